"""The one thread that carries out what the groups of this process are asked for, each as a work.

MPI moves data while somebody calls it, so the thread starts each operation without waiting and asks for all that are
under way until they are done. Operations of a group start in the order in which they were given; a receive that waits
holds up nothing.
"""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from paceline.comm.mpi.library import initialized, leave_open
from paceline.comm.mpi.presence import Presence

_EAGER_LOOKS = 200
"""So often the thread asks without a pause, then it leaves the core to others."""
_PAUSE_SECONDS = 5e-5
_LONGEST_PAUSE_SECONDS = 1e-3
_END_SECONDS = 5.0
_ANSWER_SECONDS = 1.0
"""For an answer of a rank that is in an operation; of a short timeout a quarter."""
_FAILURES = (RuntimeError, ValueError, TypeError, OverflowError, BufferError)
"""Of mpi4py, whose own are RuntimeErrors, and of tensors that it cannot read; whoever waits gets them."""


class MpiWork(Work):
    """An operation under way.

    Args:
        what: it does, for an error.
        start: starts it, in the thread; returns MPI's requests.
        finish: once these are done, in the thread: puts results where they are wanted.
        outputs: the tensors that it writes.
        seconds: after which it fails.
        presence: of the ranks that it is about.
        number: of the collective operation among those of these ranks; None if it is none.
    """

    def __init__(
        self,
        what: str,
        start: Callable[[], Sequence[Any]],
        finish: Callable[[], None],
        outputs: list[torch.Tensor],
        seconds: float,
        presence: Presence,
        number: int | None,
    ) -> None:
        super().__init__()
        self.what, self.start, self.finish, self.seconds = what, start, finish, seconds
        self.presence, self.number, self.asked = presence, number, False
        self.requests: list[Any] = []
        self.statuses: list[Any] = []
        self.deadline = time.monotonic() + seconds
        self._outputs = outputs
        self._done = threading.Event()
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def complete(self, error: Exception | None = None) -> None:
        """It is done, or has failed."""
        self._error = error
        self._done.set()
        if error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait until it is done; a timeout goes before that of the group if it is shorter.

        Raises:
            RuntimeError: it failed, or is not done in time.
        """
        if timeout and timeout.total_seconds() < self.seconds:
            self.seconds, self.deadline = timeout.total_seconds(), time.monotonic() + timeout.total_seconds()
        self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Done when this is, with the tensors that were written."""
        return self._future

    def is_completed(self) -> bool:
        """Whether it is done or has failed."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it is done."""
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """Why it failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it writes."""
        return self._outputs

    def synchronize(self) -> None:
        """See :meth:`wait`."""
        self.wait()

    def source_rank(self) -> int:
        """Of a receive from anybody: who sent, as a rank of the group."""
        return int(self.statuses[0].Get_source())

    _source_rank = source_rank


class Progress:
    """The thread."""

    def __init__(self) -> None:
        self._mpi = initialized()
        self._given: queue.SimpleQueue[MpiWork | None] = queue.SimpleQueue()
        self._late: list[MpiWork] = []
        self._thread = threading.Thread(target=self._run, name="paceline-mpi", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def abort(self, presence: Presence) -> None:
        """Let what these ranks do fail, on all of them."""

        def revoke() -> Sequence[Any]:
            presence.revoke()
            return ()

        self.give(MpiWork("an abort", revoke, lambda: None, [], _END_SECONDS, presence, None))

    def give(self, work: MpiWork) -> MpiWork:
        """Carry out a work."""
        self._given.put(work)
        return work

    def _run(self) -> None:
        active: list[MpiWork] = []
        looks, ended = 0, False
        while active or not ended:
            try:
                work = self._given.get(timeout=_pause(looks) if active else None)
            except queue.Empty:
                over = [one for one in active if self._is_over(one)]
                active = [one for one in active if one not in over]
                looks = 0 if over else looks + 1
                if looks % _EAGER_LOOKS == _EAGER_LOOKS - 1:
                    for one in {work.presence for work in active}:
                        one.look()
            else:
                looks = 0
                if work is None:
                    ended = True
                elif self._starts(work):
                    active.append(work)

    def _starts(self, work: MpiWork) -> bool:
        try:
            work.requests = [*work.start()]
        except _FAILURES as error:
            work.complete(_named(error, work))
            return False
        return True

    def _is_over(self, work: MpiWork) -> bool:
        try:
            work.statuses = [self._mpi.Status() for _ in work.requests]
            if self._mpi.Request.Testall(work.requests, work.statuses):
                work.finish()
                work.complete()
                return True
        except _FAILURES as error:
            work.complete(_named(error, work))
            return True
        left = work.deadline - time.monotonic()
        if work.number is not None and not work.asked and left < min(_ANSWER_SECONDS, work.seconds / 4):
            work.asked = True
            work.presence.ask()
        if left > 0:
            return False
        self._late.append(work)  # MPI still has its memory
        who = "" if work.number is None else f": {work.presence.late(work.number)}"
        work.complete(RuntimeError(f"Timed out waiting {work.seconds:g} s for {work.what}{who}"))
        return True

    def _end(self) -> None:
        self._given.put(None)
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive() or self._late:
            leave_open()


@functools.cache
def progress() -> Progress:
    """The thread of this process, which starts with the first group."""
    return Progress()


def _pause(looks: int) -> float:
    if looks < _EAGER_LOOKS:
        return 0.0
    return min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * (looks / _EAGER_LOOKS))


def _named(error: Exception, work: MpiWork) -> RuntimeError:
    codes = [code for status in work.statuses if (code := status.Get_error())]
    said = initialized().Get_error_string(codes[0]) if codes else str(error)
    if lost := work.presence.lost():
        work.presence.revoke()  # others may wait for this rank, which does no more
        return RuntimeError(f"{work.what}: {lost} [{said}]")
    return RuntimeError(f"{work.what}: {said}")
