"""Presence of a communicator's ranks, for errors: which ranks have entered an operation, and which ranks are lost.

Shortly before an operation times out, the communication threads ask each other, under tags of the communicator that
nothing else uses. A rank without an operation in progress does not answer, and has not entered this operation either.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.comm.mpi.library import initialized
from paceline.errors import name_ranks

TAGS = 3  # number of the largest tags, which only this module uses
_END_SECONDS = 5.0
_NEWS_SECONDS = 2.0
_POLL_SECONDS = 0.001


class Presence:
    """This rank's view of the other ranks. ``names``: numbers of the communicator's ranks in error messages."""

    def __init__(self, comm: Any, names: Sequence[int]) -> None:
        self._mpi = initialized()
        self._comm, self._names = comm, names
        self._question = comm.Get_attr(self._mpi.TAG_UB)
        self._answer, self._end = self._question - 1, self._question - 2
        self._others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
        self._entered, self._revoked = 0, False
        self._heard = dict.fromkeys(self._others, 0)
        self._sent: list[tuple[Any, Any]] = []

    def enter(self) -> int:
        """Count a collective operation that this rank enters, and return its ordinal."""
        self._entered += 1
        return self._entered

    def ask(self) -> None:
        """Ask the other ranks for their number of entered operations, and send them this rank's number."""
        with contextlib.suppress(self._mpi.Exception):  # for a lost rank, which the operation itself reports
            for rank in self._others:
                self._send(rank, self._question)

    def receive(self) -> None:
        """Read the messages of the other ranks, and answer their questions."""
        status = self._mpi.Status()
        with contextlib.suppress(self._mpi.Exception):
            for tag in (self._question, self._answer):
                while self._comm.Iprobe(self._mpi.ANY_SOURCE, tag, status):
                    rank, count = status.Get_source(), np.zeros(1, np.int64)
                    self._comm.Recv(count, rank, tag)
                    self._heard[rank] = max(self._heard[rank], int(count[0]))
                    if tag == self._question:
                        self._send(rank, self._answer)

    def _send(self, rank: int, tag: int) -> None:
        count = np.full(1, self._entered, np.int64)
        self._sent = [one for one in self._sent if not one[0].Test()]
        self._sent.append((self._comm.Isend(count, rank, tag), count))

    def late(self, number: int) -> str:
        """Return a description of the ranks that, to the knowledge of this rank, have not entered an operation."""
        missing = [self._names[rank] for rank, entered in self._heard.items() if entered < number]
        return f"{name_ranks(missing)} did not enter it" if missing else "all ranks have entered it"

    def lost(self) -> str:
        """Return a description of the lost ranks, or an empty string if MPI knows of none."""
        ranks = self._failed()
        deadline = time.monotonic() + _NEWS_SECONDS
        while not ranks and not self._revoked and self._is_revoked() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)  # another rank has seen the loss; MPI receives the news only during calls
            with contextlib.suppress(self._mpi.Exception):
                self._mpi.COMM_SELF.Iprobe()
            ranks = self._failed()
        return f"lost {name_ranks(self._names[rank] for rank in ranks)}" if ranks else ""

    def _failed(self) -> list[int]:
        with contextlib.suppress(self._mpi.Exception, NotImplementedError):
            gone = self._mpi.Group.Intersection(self._comm.Get_group(), self._comm.Get_failed())
            return [*gone.Translate_ranks(range(gone.Get_size()), self._comm.Get_group())]
        return []

    def _is_revoked(self) -> bool:
        with contextlib.suppress(self._mpi.Exception, NotImplementedError):
            return bool(self._comm.Is_revoked())
        return False

    def leave(self) -> None:
        """Wait up to 5 s for the other ranks to end, so that they can read this rank's messages. Skip if it failed."""
        deadline, status = time.monotonic() + _END_SECONDS, self._mpi.Status()
        ended = set() if getattr(sys, "last_value", None) is None else {*self._others}
        with contextlib.suppress(self._mpi.Exception):
            for rank in self._others if not ended else ():
                self._send(rank, self._end)
            while len(ended) < len(self._others) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                while self._comm.Iprobe(self._mpi.ANY_SOURCE, self._end, status):
                    ended.add(status.Get_source())
                    self._comm.Recv(np.zeros(1, np.int64), status.Get_source(), self._end)

    def revoke(self) -> None:
        """End all waits on this communicator, on all ranks, if MPI supports it."""
        self._revoked = True
        with contextlib.suppress(self._mpi.Exception, NotImplementedError):
            self._comm.Revoke()
