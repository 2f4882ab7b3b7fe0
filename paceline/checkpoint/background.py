"""Background thread for saves, which runs a single save at a time and reports every error."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable

_instances: set[Background] = set()


class Background:
    """Runner of a single job at a time beside the training thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Start a job after waiting for the previous job.

        Raises:
            the error of the previous job.
        """
        self.finish()
        if self not in _instances:
            _instances.add(self)
            _at_exit(self._finish_at_exit)
        self._thread = threading.Thread(target=self._run, args=(job,), name="paceline-checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the job.

        Raises:
            the error of the job, once.
        """
        if self._thread is not None:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise the error of a finished job, once. Does not wait."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self, seconds: float) -> None:
        """Wait for the job for at most ``seconds``. Leaves an error for :meth:`check`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised in the training thread
            self._error = error

    def _finish_at_exit(self) -> None:
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001 - no caller is left to catch it
            sys.excepthook(type(error), error, error.__traceback__)  # the session's hook sets the exit code


def join_all(seconds: float = threading.TIMEOUT_MAX) -> None:
    """Wait for all jobs of this process for at most ``seconds``. Leaves errors for ``check`` and ``finish``."""
    deadline = time.monotonic() + seconds
    for background in list(_instances):
        background.join(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))


def _at_exit(call: Callable[[], None]) -> None:
    """Register a call that runs when the script ends, while clients of object stores can still start threads.

    ``atexit`` runs too late for that. ``concurrent.futures`` uses the same hook.
    """
    getattr(threading, "_register_atexit", atexit.register)(call)
