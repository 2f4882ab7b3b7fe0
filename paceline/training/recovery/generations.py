"""Generations of workers in an elastic Horovod run, as the coordinator of ``paceline run`` forms them.

::

    survivors      commit 7 ✗ ─ restore ─ ready ─ membership 1 ─ process group ─ sync ─ commit 8
    lost           commit 7 †
    replacement    ............. init: ready ...  membership 2 ─ process group ─ sync ─ commit 9

A worker without a state is never rank 0 if another worker has one, because scripts take the state of rank 0.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

from paceline.comm.rendezvous.coordinator_client import CoordinatorClient, SocketLink
from paceline.comm.rendezvous.env_init import reason_of
from paceline.comm.rendezvous.process_group import ProcessGroup
from paceline.comm.transport.gloo import Gloo
from paceline.coordinator.types import Departure, Generation
from paceline.environments import env
from paceline.environments.start import Identity
from paceline.errors import PREEMPTED, WorkerLost


class Generations:
    """Membership of this worker from one generation to the next."""

    def __init__(self, launched: env.LaunchInfo, seconds: float) -> None:
        self.commits: int | None = None  # number of commits in this worker's state; None before it has a state
        self.furthest = 0  # largest number of commits of any worker when this generation was formed
        self.on_lost: Callable[[], None] = lambda: None  # callback for the loss of a worker, called on another thread
        # callback with the number of the next generation when it is announced, called on another thread
        self.on_change: Callable[[int], None] = lambda generation: None
        # function that returns whether the script is waiting for other workers
        self.is_waiting: Callable[[], bool] = lambda: False
        link = SocketLink(launched.coordinator, launched.worker, launched.key, seconds)
        self._client = CoordinatorClient(link, launched.worker, seconds)
        self._group = ProcessGroup(lambda *at: Gloo(same_host=False), seconds)
        self._began = False
        self._since = time.monotonic(), False
        self._client.on_alarm = self._interrupt
        self._client.on_change = lambda generation: self.on_change(generation)
        atexit.register(self._end)

    @property
    def address(self) -> str:
        """Address at which other workers reach this machine."""
        return self._client.address

    @property
    def number(self) -> int:
        """Number of the current generation."""
        return self._client.generation

    @property
    def alarmed(self) -> bool:
        """Whether a worker was lost since this generation was formed."""
        return self._client.alarm > self._client.generation

    @property
    def pending(self) -> int:
        """Number of the next generation if it has been announced, otherwise of the current generation."""
        return max(self._client.pending, self.number)

    def next(self) -> Identity:
        """Wait for the next generation and connect to its workers. Return this worker's new identity.

        Raises:
            SystemExit: the run has ended.
        """
        if not self._began:
            self._began = True
            about = {"host": platform.node(), "pid": os.getpid(), "address": self.address}
            self._client.report(self._status)
            self._client.register(about, {"interface": "horovod"}, None, ())
        planned = not self.alarmed
        while True:
            self._group.leave()
            progress = None if self.commits is None else (self.commits, 0)
            answer = self._client.await_membership(progress, None, planned=planned)
            if isinstance(answer, Departure):
                if answer.code in (0, PREEMPTED):
                    raise SystemExit(answer.code)
                raise WorkerLost(f"{answer.reason[:1].upper()}{answer.reason[1:]}.")
            try:
                return self._connect(answer)
            except WorkerLost:
                planned = False

    def _connect(self, generation: Generation) -> Identity:
        membership = generation.membership_of(self._client.number)
        rank, size = membership.rank, membership.size
        store = self._client.open_store()
        self._group.enter(store, rank, size)
        try:
            store.set(f"generations/commits/{rank}", json.dumps(self.commits))
            found = [json.loads(one) for one in store.multi_get([f"generations/commits/{one}" for one in range(size)])]
            first = next((one for one, commits in enumerate(found) if commits is not None), 0)
            self.furthest = max((commits for commits in found if commits is not None), default=0)
            rank = (rank - first) % size
            if size > 1:
                self._group.enter(store, rank, size)
                self._group.join()
            if self.alarmed:  # the alarm came while the connections were made
                raise WorkerLost(f"Rank {rank}: another worker was lost while the workers were connecting.")
        except RuntimeError as error:
            raise WorkerLost(f"Rank {rank}: could not reach the others: {reason_of(error)}.") from error
        return Identity(rank, size, membership.local_rank, len(membership.near), self.number)

    def cut(self) -> None:
        """Abort every pending call of torch's process group that waits for other workers."""
        self._group.cut()

    def _interrupt(self) -> None:
        self._group.interrupt()
        self.on_lost()

    def _status(self) -> dict[str, Any]:
        waiting = self.is_waiting()
        if waiting != self._since[1]:
            self._since = time.monotonic(), waiting
        doing = "in an operation of Horovod" if waiting else "computing"
        since = time.monotonic() - self._since[0]
        step = self.commits or 0
        return {"step": step, "doing": doing, "waiting": waiting, "busy": True, "since": since, "step_seconds": None}

    def _end(self) -> None:
        """Report that the script has ended. After an exception report nothing: the others treat the exit as a loss."""
        if not hasattr(sys, "last_type"):
            self._client.end_script()
