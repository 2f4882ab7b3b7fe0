"""Communication thread that carries out the operations of all groups of this process.

MPI moves data only while a thread calls it. So the communication thread starts each operation without waiting, and
polls all operations in progress until they are done. Operations of a group start in the order of submission. A receive
that waits does not block later operations.
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
from torch.distributed import Work

from paceline.comm.mpi.library import initialized, leave_open
from paceline.comm.mpi.presence import Presence
from paceline.system.torch_internals import called_by_torch

_EAGER_LOOKS = 200  # number of polls without a pause, after which the thread leaves the core to others
_PAUSE_SECONDS = 5e-5
_LONGEST_PAUSE_SECONDS = 1e-3
_END_SECONDS = 5.0
_ANSWER_SECONDS = 5.0
"""Time for answers of ranks that are in an operation, but at most a quarter of the operation's timeout."""
_FAILURES = (RuntimeError, ValueError, TypeError, OverflowError, BufferError)
"""Errors of mpi4py (RuntimeError) and of tensors that mpi4py cannot read. The waiting thread raises them."""


@called_by_torch
class MpiWork(Work):
    """Operation in progress.

    Args:
        start: function that starts the operation in the communication thread, and returns MPI's requests.
        finish: function that copies the results into the outputs in the thread, once the requests are done.
        number: ordinal among the collective operations of the group. None if the operation is not collective.
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
        """Mark the operation as done, or as failed with an error."""
        self._error = error
        self._done.set()
        if error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait until the operation is done. A timeout replaces that of the operation if it is shorter.

        Raises:
            RuntimeError: the operation failed or timed out.
        """
        if timeout and timeout.total_seconds() < self.seconds:
            self.seconds, self.deadline = timeout.total_seconds(), time.monotonic() + timeout.total_seconds()
        self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that gives the written tensors when the operation is done."""
        return self._future

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error of a failed operation, otherwise None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """Return the sender of a receive from any rank, as a rank of the group."""
        return int(self.statuses[0].Get_source())


class Progress:
    """Communication thread."""

    def __init__(self) -> None:
        self._mpi = initialized()
        self._given: queue.SimpleQueue[MpiWork | None] = queue.SimpleQueue()
        self._late: list[MpiWork] = []
        self._thread = threading.Thread(target=self._run, name="paceline-mpi", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def abort(self, presence: Presence) -> None:
        """Make the operations of a group fail on all its ranks."""

        def revoke() -> Sequence[Any]:
            presence.revoke()
            return ()

        self.give(MpiWork("an abort", revoke, lambda: None, [], _END_SECONDS, presence, None))

    def give(self, work: MpiWork) -> MpiWork:
        """Submit a work to the thread, and return it."""
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
                        one.receive()
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
        self._late.append(work)  # MPI may still access its memory
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
    """Return the communication thread of this process, which starts with the first call."""
    return Progress()


def _pause(looks: int) -> float:
    if looks < _EAGER_LOOKS:
        return 0.0
    return min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * (looks / _EAGER_LOOKS))


def _named(error: Exception, work: MpiWork) -> RuntimeError:
    codes = [code for status in work.statuses if (code := status.Get_error())]
    said = initialized().Get_error_string(codes[0]) if codes else str(error)
    if lost := work.presence.lost():
        work.presence.revoke()  # other ranks may wait for this rank, which has stopped
        return RuntimeError(f"{work.what}: {lost} [{said}]")
    return RuntimeError(f"{work.what}: {said}")
