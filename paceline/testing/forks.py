"""Test workers that are forks of this process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkProcess

from paceline.environments import env
from paceline.testing.ranks import Process, Worker


class Forked:
    """Forked process with the methods of ``subprocess.Popen`` that :class:`Process` needs."""

    def __init__(self, process: ForkProcess) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int, /) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, signal.Signals(number))

    def wait(self) -> None:
        self._process.join()


def fork(call: Callable[[], None], workers: list[Worker]) -> Sequence[Process]:
    """Fork this process for each worker, without its other threads, and call a function in the fork."""
    started = []
    for worker in workers:
        for path in (worker.out, worker.err):  # the process may be killed before it opens them
            path.write_bytes(b"")
        with warnings.catch_warnings():  # Python warns about forks with threads; the caller asked for a fork
            warnings.simplefilter("ignore", DeprecationWarning)
            process = multiprocessing.get_context("fork").Process(target=_be, args=(worker, call))
            process.start()
        started.append(Forked(process))
    return started


def _be(worker: Worker, call: Callable[[], None]) -> None:
    """Take on the worker's environment and output files, then call the function."""
    env.replace(worker.environment)
    for stream, path in ((1, worker.out), (2, worker.err)):
        with path.open("wb") as file, contextlib.suppress(OSError):
            os.dup2(file.fileno(), stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - a test runner has replaced these streams
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    call()
