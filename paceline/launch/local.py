"""Workers on this machine: start them together, watch them, end them together.

Each worker leads a session of its own, so that its whole family can be ended: a data loader's processes too.
When the launcher itself is killed, the kernel ends the workers (Linux) and a waiting shell their families.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType, TracebackType
from typing import IO, Protocol, TypeAlias

from paceline.errors import StartError
from paceline.launch.base import Launch
from paceline.launch.kernel import OutOfMemory
from paceline.launch.output import Show, Stream

_POLL_SECONDS = 0.02
_AT_ONCE = ((0.0, signal.SIGKILL),)
_PR_SET_PDEATHSIG = 1
_REAPER = """
while read -r line; do
  [ "$line" = done ] && exit
  groups="$groups $line"
done
for group in $groups; do kill -KILL "-$group"; done
"""


Pipe: TypeAlias = "tuple[int, str, IO[bytes], int]"
"""What a worker prints: its number, the name of the stream, the pipe, and the file for everything."""


@dataclass(frozen=True)
class Ended:
    """How one worker ended."""

    rank: int  # the number of the worker: its rank at the start
    code: int  # below zero: the signal that ended it
    time: float
    stopped: bool  # we had asked it to end
    forgiven: bool = False  # training went on without it
    pid: int = 0
    starved: bool = False  # the kernel had just ended a process for lack of memory

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 + the signal."""
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True)
class RunResult:
    """How a launch ended."""

    ended: tuple[Ended, ...]
    signal: int | None  # that somebody sent to the launcher
    seconds: float


class Supervision(Protocol):
    """What becomes of the others when a worker ends."""

    def started(self, number: int, pid: int) -> None:
        """A worker was started."""
        ...

    def ended(self, one: Ended) -> bool:
        """A worker has ended; true if the others go on."""
        ...

    def wanted(self) -> int:
        """How many more workers are to be started now."""
        ...

    def first(self) -> int:
        """The worker whose output is shown."""
        ...

    def over(self) -> bool:
        """Whether those that are left are to end."""
        ...

    def interrupted(self) -> None:
        """Somebody has sent a signal to the launcher."""
        ...

    def patience(self) -> tuple[float, float]:
        """How many seconds those that are to end get until they are asked, and until they are ended."""
        ...


class Alike:
    """All start together; one that fails ends all."""

    def started(self, number: int, pid: int) -> None:
        pass

    def ended(self, one: Ended) -> bool:
        return one.code == 0

    def wanted(self) -> int:
        return 0

    def first(self) -> int:
        return 0

    def over(self) -> bool:
        return False

    def interrupted(self) -> None:
        pass

    def patience(self) -> tuple[float, float]:
        return 1.0, 3.0  # they may still report


class Workers:
    """The processes of one launch. Leaving the ``with`` block ends whatever is still there."""

    def __init__(self, launch: Launch, show: Show, supervision: Supervision | None = None) -> None:
        self._launch = launch
        self._show = show
        self._supervision = supervision or Alike()
        self._started = 0
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._handles: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._ended: list[Ended] = []
        self._streams: list[Stream] = []
        self._due: list[tuple[float, signal.Signals]] = []
        self._asked = False
        self._signals: list[int] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._logs = contextlib.ExitStack()
        self._reaper: subprocess.Popen[bytes] | None = None
        self._memory = OutOfMemory()
        self._begin = time.monotonic()

    def __enter__(self) -> Workers:
        self._catch_signals()
        try:
            self._reaper = _start_reaper()
            pipes = [pipe for _ in range(self._launch.workers) for pipe in self._start()]
        except BaseException:
            self.__exit__(None, None, None)
            raise
        # Threads only now: a process is forked safely while there is one thread.
        self._read(pipes)
        return self

    def _read(self, pipes: list[Pipe]) -> None:
        for number, name, pipe, log in pipes:
            self._streams.append(Stream(name, pipe, log, partial(self._show_first, number)))

    def _show_first(self, number: int, name: str, line: str) -> None:
        if number == self._supervision.first():
            self._show(name, line)

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
        while self._handles:
            os.close(self._handles.popitem()[1])
        # A process that left its session may hold the pipe: its lines are lost then, and its log stays open.
        if all([stream.join(2.0) for stream in self._streams]):
            self._logs.close()
        if self._reaper is not None:
            with contextlib.suppress(BrokenPipeError):
                self._reaper.communicate(b"done\n")
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def wait(self) -> RunResult:
        """Until every worker has ended, of itself or because another one failed."""
        received = 0
        while self._running:
            now = time.monotonic()
            if len(self._signals) > received:
                received = len(self._signals)
                self._supervision.interrupted()
                grace = self._launch.grace_seconds
                self._schedule(((0.0, signal.SIGTERM), (grace, signal.SIGKILL)) if received == 1 else _AT_ONCE, now)
            self._collect(now)
            self._send_due(now)
            if not self._asked and not self._due:
                if self._supervision.over():
                    self._end_soon(now)
                for _ in range(self._supervision.wanted()):
                    self._read(self._start())
            self._doze()
        ended = tuple(sorted(self._ended, key=lambda one: one.rank))
        return RunResult(ended, self._signals[0] if self._signals else None, time.monotonic() - self._begin)

    def _start(self) -> list[Pipe]:
        """Start the next worker; gives the pipes to read from."""
        number, self._started = self._launch.first + self._started, self._started + 1
        log = self._logs.enter_context(self._launch.output(number).open("ab", buffering=0))
        shown = number == self._launch.first or self._launch.roster is not None
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        try:
            worker = subprocess.Popen(
                self._launch.command(),
                env=self._launch.worker_environment(number, self._take_place(number)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if shown else log,
                stderr=subprocess.PIPE if shown else log,
                start_new_session=True,
                preexec_fn=_prepare(libc, os.getpid(), self._cores(number)),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise StartError(f"Worker {number} of {self._launch.workers} could not be started: {error}.") from None
        self._running[number] = worker
        self._supervision.started(number, worker.pid)
        if self._reaper is not None and self._reaper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._reaper.stdin.write(f"{worker.pid}\n".encode())
                self._reaper.stdin.flush()
        if worker.stdout is None or worker.stderr is None:
            return []
        return [(number, "stdout", worker.stdout, log.fileno()), (number, "stderr", worker.stderr, log.fileno())]

    def _take_place(self, number: int) -> int:
        """The place on this machine of one that has ended; a worker that only stands by has none of its own yet."""
        free = set(range(self._launch.workers)) - set(self._places.values())
        place = min(free, default=(number - self._launch.first) % self._launch.workers)
        self._places[number] = place
        return place

    def _cores(self, rank: int) -> frozenset[int]:
        return self._launch.cores[rank % len(self._launch.cores)] if self._launch.cores else frozenset()

    def _doze(self) -> None:
        """Until a worker ends, or for a moment."""
        if not hasattr(os, "pidfd_open"):
            time.sleep(_POLL_SECONDS)
            return
        for number in self._running.keys() - self._handles.keys():
            self._handles[number] = os.pidfd_open(self._running[number].pid)  # not yet waited for: it is there
        poll = select.poll()
        for number in self._running:
            poll.register(self._handles[number], select.POLLIN)
        poll.poll(1000 * _POLL_SECONDS)

    def _collect(self, now: float) -> None:
        for rank, worker in list(self._running.items()):
            code = worker.poll()
            if code is None:
                continue
            _kill_family(worker)
            del self._running[rank], self._places[rank]
            if rank in self._handles:
                os.close(self._handles.pop(rank))
            starved = code != 0 and self._memory.again()
            one = Ended(rank, code, time.time(), self._asked, pid=worker.pid, starved=starved)
            forgiven = self._supervision.ended(one)
            self._ended.append(replace(one, forgiven=forgiven and code != 0))
            if not forgiven and not self._due and not self._asked:
                self._end_soon(now)

    def _end_soon(self, now: float) -> None:
        asked, ended = self._supervision.patience()
        self._schedule(((asked, signal.SIGTERM), (ended, signal.SIGKILL)), now)

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
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
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


def _start_reaper() -> subprocess.Popen[bytes] | None:
    """A shell that is told of each worker, and ends their families when we go without a last word."""
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", _REAPER, "paceline-reaper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None  # no shell here: the kernel still ends the workers themselves
