"""Handle of a submitted operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.horovod.engine.operations import Task
from paceline.horovod.engine.requests import Request
from paceline.horovod.errors import HorovodInternalError


class Handle:
    """Handle of a submitted operation, for ``poll`` and ``synchronize``.

    Args:
        on_wait: called with the handle when the script begins to wait for a pending operation.
    """

    single = False  # whether :meth:`results` returns the only result itself, instead of a list

    def __init__(self, request: Request, task: Task, on_wait: Callable[[Handle], None]) -> None:
        self.request, self.task, self._on_wait = request, task, on_wait
        self.since = time.monotonic()  # monotonic time of the submission, in seconds
        # result other than a tensor: the last rank to join, the ID of a process set, or a process group. For
        # ``allgather`` and ``alltoall``, the number of rows of each member.
        self.value: Any = None
        self._error: str = ""
        self._done = threading.Event()

    def done(self) -> bool:
        """Return whether the operation has ended, so that :meth:`wait` does not block."""
        return self._done.is_set()

    def wait_for(self, seconds: float) -> None:
        """Wait for at most ``seconds`` without raising the operation's error."""
        self._done.wait(seconds)

    def wait(self) -> list[Any]:
        """Wait until the operation has ended and return its results."""
        if not self._done.is_set():
            self._on_wait(self)
            self._done.wait()
        if self._error:
            raise HorovodInternalError(self._error)
        return self.task.outputs

    def results(self) -> Any:
        """Wait until the operation has ended and return its result, or the list of its results."""
        found = self.wait()
        return found[0] if self.single else found

    def end(self, error: str = "") -> None:
        """Mark the operation as ended and wake waiting threads. A nonempty ``error`` marks it as failed."""
        self._error = error
        self._done.set()
