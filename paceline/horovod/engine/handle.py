"""An operation under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.horovod.engine.operations import Task
from paceline.horovod.engine.requests import Request
from paceline.horovod.errors import HorovodInternalError


class Handle:
    """An operation under way.

    Args:
        request: what was asked for.
        task: its tensors and results.
        on_wait: called when the script begins to wait for it.

    Attributes:
        request: what was asked for.
        task: its tensors and results.
        since: when it was asked for.
        value: a result that is no tensor: the last rank of a join, the number of a process set, a process group; of
            ``allgather`` and ``alltoall`` the rows of each member.
    """

    def __init__(self, request: Request, task: Task, on_wait: Callable[[Handle], None]) -> None:
        self.request, self.task, self._on_wait = request, task, on_wait
        self.since = time.monotonic()
        self.value: Any = None
        self._error: str = ""
        self._done = threading.Event()

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._done.is_set()

    def wait_for(self, seconds: float) -> None:
        """Wait a while, whatever comes of it."""
        self._done.wait(seconds)

    def wait(self) -> list[Any]:
        """Wait for the results.

        Raises:
            HorovodInternalError: the operation failed.
        """
        if not self._done.is_set():
            self._on_wait(self)
            self._done.wait()
        if self._error:
            raise HorovodInternalError(self._error)
        return self.task.outputs

    def end(self, error: str = "") -> None:
        """Let go of who waits."""
        self._error = error
        self._done.set()
