"""Workers on this machine: start them together, watch them, end them together.

Each worker leads a session of its own, so that its whole family can be ended: a data loader's processes too.
When the launcher itself is killed, the kernel ends the workers (Linux) and a waiting shell their families.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import IO

from paceline.errors import StartError
from paceline.launch.base import Launch
from paceline.launch.output import Show, Stream

_POLL_SECONDS = 0.02
# (seconds from now, signal): when one has failed the others may still report, are asked, are ended.
_AFTER_FAILURE = ((1.0, signal.SIGTERM), (3.0, signal.SIGKILL))
_AFTER_SIGNAL = ((0.0, signal.SIGTERM), (10.0, signal.SIGKILL))
_AT_ONCE = ((0.0, signal.SIGKILL),)
_PR_SET_PDEATHSIG = 1
_REAPER = 'read line; [ "$line" = done ] || for group; do kill -KILL "-$group"; done'


@dataclass(frozen=True)
class Ended:
    """How one worker ended."""

    rank: int
    code: int  # below zero: the signal that ended it
    time: float
    stopped: bool  # we had asked it to end

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 + the signal."""
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    ended: tuple[Ended, ...]
    signal: int | None  # that somebody sent to the launcher
    seconds: float


class Workers:
    """The processes of one launch. Leaving the ``with`` block ends whatever is still there."""

    def __init__(self, launch: Launch, show: Show) -> None:
        self._launch = launch
        self._show = show
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: list[Ended] = []
        self._streams: list[Stream] = []
        self._due: list[tuple[float, signal.Signals]] = []
        self._asked = False
        self._signals: list[int] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._logs = contextlib.ExitStack()
        self._reaper: subprocess.Popen[bytes] | None = None
        self._begin = time.monotonic()

    def __enter__(self) -> Workers:
        self._catch_signals()
        try:
            pipes = self._start_all()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        # Threads only now: a process is forked safely while there is one thread.
        self._streams = [Stream(name, pipe, log, self._show) for name, pipe, log in pipes]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._running.values():
            _kill_family(worker)
            worker.wait()
            for pipe in (worker.stdout, worker.stderr):
                if pipe is not None and not self._streams:
                    pipe.close()
        self._running.clear()
        # A process that left its session may hold the pipe: its lines are lost then, and its log stays open.
        if all([stream.join(2.0) for stream in self._streams]):
            self._logs.close()
        if self._reaper is not None:
            with contextlib.suppress(BrokenPipeError):
                self._reaper.communicate(b"done\n")
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def wait(self) -> Outcome:
        """Until every worker has ended, of itself or because another one failed."""
        received = 0
        while self._running:
            now = time.monotonic()
            if len(self._signals) > received:
                received = len(self._signals)
                self._schedule(_AFTER_SIGNAL if received == 1 else _AT_ONCE, now)
            self._collect(now)
            self._send_due(now)
            time.sleep(_POLL_SECONDS)
        ended = tuple(sorted(self._ended, key=lambda one: one.rank))
        return Outcome(ended, self._signals[0] if self._signals else None, time.monotonic() - self._begin)

    def _start_all(self) -> list[tuple[str, IO[bytes], int]]:
        pipes = []
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        for rank in range(self._launch.workers):
            log = self._logs.enter_context(self._launch.output(rank).open("ab", buffering=0))
            shown = rank == 0
            try:
                worker = subprocess.Popen(
                    self._launch.command(),
                    env=self._launch.worker_environment(rank),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if shown else log,
                    stderr=subprocess.PIPE if shown else log,
                    start_new_session=True,
                    preexec_fn=_prepare(libc, os.getpid(), self._cores(rank)),
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise StartError(f"Worker {rank} of {self._launch.workers} could not be started: {error}.") from None
            self._running[rank] = worker
            if worker.stdout is not None and worker.stderr is not None:
                pipes = [("stdout", worker.stdout, log.fileno()), ("stderr", worker.stderr, log.fileno())]
        self._reaper = _start_reaper(worker.pid for worker in self._running.values())
        return pipes

    def _cores(self, rank: int) -> frozenset[int]:
        return self._launch.cores[rank] if self._launch.cores else frozenset()

    def _collect(self, now: float) -> None:
        for rank, worker in list(self._running.items()):
            code = worker.poll()
            if code is None:
                continue
            _kill_family(worker)
            del self._running[rank]
            self._ended.append(Ended(rank, code, time.time(), self._asked))
            if code != 0 and not self._due and not self._asked:
                self._schedule(_AFTER_FAILURE, now)

    def _schedule(self, steps: tuple[tuple[float, signal.Signals], ...], now: float) -> None:
        self._due = [(now + seconds, number) for seconds, number in steps]

    def _send_due(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, number = self._due.pop(0)
            self._asked = True
            for worker in self._running.values():
                if number == signal.SIGKILL:
                    _kill_family(worker)
                else:
                    worker.send_signal(number)  # to the worker alone: it ends its own family in its own order

    def _catch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's background job
                self._handlers[number] = signal.signal(number, lambda got, _: self._signals.append(got))


def _kill_family(worker: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)


def _prepare(libc: ctypes.CDLL | None, launcher: int, cores: Iterable[int]) -> Callable[[], None]:
    """What a new process does before it becomes the worker. Nothing here may allocate much or import."""
    cores = frozenset(cores)

    def prepare() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # it ended before we asked
                os._exit(1)
        if cores:
            os.sched_setaffinity(0, cores)

    return prepare


def _start_reaper(groups: Iterable[int]) -> subprocess.Popen[bytes] | None:
    """A shell that waits for our last word, and ends the workers' families when we go without it."""
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", _REAPER, "paceline-reaper", *map(str, groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None  # no shell here: the kernel still ends the workers themselves
