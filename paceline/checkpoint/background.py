"""A thread that saves while training goes on: one save at a time, and no error is lost."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable

_all: set[Background] = set()


class Background:
    """Runs one piece of work at a time beside the training thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether work is being done now."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begin; what was begun before is waited for first.

        Raises:
            what the work before raised.
        """
        self.finish()
        if self not in _all:
            _all.add(self)
            _before_the_end(self._finish_at_the_end)
        self._thread = threading.Thread(target=self._run, args=(work,), name="paceline-checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the work is done.

        Raises:
            what it raised; once.
        """
        if self._thread is not None:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise what finished work raised, once; does not wait."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self, seconds: float) -> None:
        """Wait for so long at the most; an error stays for :meth:`check`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks
            self._error = error

    def _finish_at_the_end(self) -> None:
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001 - nobody is left who could catch it
            sys.excepthook(type(error), error, error.__traceback__)  # the session's ends with its exit code


def join_all(seconds: float = threading.TIMEOUT_MAX) -> None:
    """Wait for all work under way in this process, for so many seconds at the most; errors stay to be raised."""
    until = time.monotonic() + seconds
    for one in list(_all):
        one.join(max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX)))


def _before_the_end(call: Callable[[], None]) -> None:
    """Call this when the script has ended, while threads can still be started: object stores need them.

    ``atexit`` is too late for that; ``concurrent.futures`` uses the same hook.
    """
    getattr(threading, "_register_atexit", atexit.register)(call)
