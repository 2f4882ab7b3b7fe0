"""Lifecycle of the workers of one launch: start them together, watch them, end them together."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TypeAlias

from paceline.errors import StartError
from paceline.launchers.base import Launch, RunResult, WorkerExit, WorkerProcess
from paceline.launchers.output import Show, Stream
from paceline.launchers.registry import launcher_named

_POLL_SECONDS = 0.02
_AGAIN_SECONDS = 1.0
_AT_ONCE = ((0.0, signal.SIGKILL),)


Pipe: TypeAlias = "tuple[int, str, int, int]"
"""Output pipe of a worker: worker number, stream name, read end of the pipe, descriptor of the log file."""


class Supervisor:
    """Policy that decides what happens to the other workers when a worker ends.

    This class is the policy of fixed runs: all workers start together, and a failed worker ends all others.
    """

    def started(self, number: int, pid: int) -> None:
        """Handle the start of a worker."""

    def ended(self, one: WorkerExit) -> bool:
        """Handle the end of a worker. Return whether the other workers continue."""
        return one.code == 0

    def to_start(self, at_once: bool) -> int:
        """Return the number of workers to start now. `at_once`: a start does not use a core for seconds."""
        return 0

    def shown(self) -> int:
        return 0

    def over(self) -> bool:
        """Return whether the remaining workers must end."""
        return False

    def waits(self) -> bool:
        """Return whether the launcher keeps running although no worker of this machine is left."""
        return False

    def interrupted(self) -> None:
        """Handle a signal to the launcher."""

    def grace(self) -> tuple[float, float]:
        """Return the delays in seconds after which workers that must end get SIGTERM and SIGKILL."""
        return 1.0, 3.0  # time for the workers to write their reports


class Workers:
    """Workers of one launch. Leaving the ``with`` block kills workers that still run."""

    def __init__(
        self,
        launch: Launch,
        show: Show,
        supervisor: Supervisor | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._launch, self._show = launch, show
        self._supervisor = supervisor or Supervisor()
        self._launcher = launcher_named(launch.launcher)()
        self._launcher.note = note
        self._started = 0
        self._running: dict[int, WorkerProcess] = {}
        self._handles: dict[int, int] = {}
        self._local_ranks: dict[int, int] = {}
        self._exits: list[WorkerExit] = []
        self._streams: list[Stream] = []
        self._due: list[tuple[float, signal.Signals]] = []
        self._asked = False
        self._signals: list[int] = []
        self._catching = contextlib.ExitStack()
        self._logs = contextlib.ExitStack()
        self._begin = time.monotonic()

    def __enter__(self) -> Workers:
        self._signals = self._catching.enter_context(stop_signals())
        pipes: list[Pipe] = []
        try:
            self._launcher.begin(self._launch)
            self._launcher.wait_until_ready(lambda: bool(self._signals))
            for _ in range(self._launch.workers):
                pipes += self._start()
        except BaseException:
            for _, _, pipe, _ in pipes:
                os.close(pipe)
            self.__exit__()
            raise
        # Reader threads start after the workers because a third-party launcher may fork.
        self._read(pipes)
        return self

    def _read(self, pipes: list[Pipe]) -> None:
        for number, name, pipe, log in pipes:
            self._streams.append(Stream(name, pipe, log, partial(self._show_line, number)))

    def _show_line(self, number: int, name: str, line: str) -> None:
        if number == self._supervisor.shown():
            self._show(name, line)

    def __exit__(self, *exception: object) -> None:
        for worker in self._running.values():
            worker.kill()
            while worker.poll() is None:
                time.sleep(_POLL_SECONDS)
                worker.kill()  # it may not have led its process group before
        self._running.clear()
        while self._handles:
            os.close(self._handles.popitem()[1])
        # A process that left its session may hold the pipe. Its lines are then lost, and the log stays open.
        if all([stream.join(2.0) for stream in self._streams]):
            self._logs.close()
        self._launcher.close()
        self._catching.close()

    def wait(self) -> RunResult:
        """Wait until all workers have ended, by themselves or because another worker failed."""
        received = 0
        while self._running or self._supervisor.waits():
            now = time.monotonic()
            if len(self._signals) > received:
                received = len(self._signals)
                self._supervisor.interrupted()
                grace = self._launch.grace_seconds
                self._schedule(((0.0, signal.SIGTERM), (grace, signal.SIGKILL)) if received == 1 else _AT_ONCE, now)
            self._collect(now)
            self._send_due(now)
            if not self._asked and not self._due:
                if self._supervisor.over():
                    self._end_soon(now)
                for _ in range(self._supervisor.to_start(self._launcher.starts_at_once())):
                    self._read(self._start())
            self._sleep()
        exits = tuple(sorted(self._exits, key=lambda one: one.worker))
        return RunResult(exits, self._signals[0] if self._signals else None, time.monotonic() - self._begin)

    def _start(self) -> list[Pipe]:
        """Start the next worker. Return its output pipes."""
        number, self._started = self._launch.first + self._started, self._started + 1
        log = self._logs.enter_context(self._launch.output(number).open("ab", buffering=0)).fileno()
        pipes: list[Pipe] = []
        ends = [log, log]
        if number == self._launch.first or self._launch.coordinator is not None:
            for stream, name in enumerate(("stdout", "stderr")):
                read, ends[stream] = os.pipe()
                pipes.append((number, name, read, log))
        try:
            worker = self._launcher.start(self._launch.worker(number, self._take_local_rank(number)), ends[0], ends[1])
        except OSError as error:
            for _, _, read, _ in pipes:
                os.close(read)
            raise StartError(f"Worker {number} of {self._launch.workers} could not be started: {error}.") from None
        finally:
            if pipes:
                os.close(ends[0])
                os.close(ends[1])
        self._running[number] = worker
        self._supervisor.started(number, worker.pid)
        return pipes

    def _take_local_rank(self, number: int) -> int:
        """Return a free local rank. A standby worker shares a local rank until a worker has ended."""
        free = set(range(self._launch.workers)) - set(self._local_ranks.values())
        local_rank = min(free, default=(number - self._launch.first) % self._launch.workers)
        self._local_ranks[number] = local_rank
        return local_rank

    def _sleep(self) -> None:
        """Wait until a worker of this machine ends, for at most ``_POLL_SECONDS``."""
        if not hasattr(os, "pidfd_open"):
            time.sleep(_POLL_SECONDS)
            return
        for number in self._running.keys() - self._handles.keys():
            if self._running[number].pid:
                with contextlib.suppress(ProcessLookupError):  # ended and already reaped while it was signaled
                    self._handles[number] = os.pidfd_open(self._running[number].pid)
        poll = select.poll()
        for handle in self._handles.values():
            poll.register(handle, select.POLLIN)
        poll.poll(1000 * _POLL_SECONDS)

    def _collect(self, now: float) -> None:
        for number, worker in list(self._running.items()):
            if (code := worker.poll()) is None:
                continue
            worker.kill()  # processes that the worker started
            self._launcher.ended(worker)
            del self._running[number], self._local_ranks[number]
            if number in self._handles:
                os.close(self._handles.pop(number))
            out_of_memory = code != 0 and self._launcher.ran_out_of_memory()
            one = WorkerExit(number, code, time.time(), self._asked, pid=worker.pid, out_of_memory=out_of_memory)
            tolerated = self._supervisor.ended(one)
            self._exits.append(replace(one, tolerated=tolerated and code != 0))
            if not tolerated and not self._due and not self._asked:
                self._end_soon(now)

    def _end_soon(self, now: float) -> None:
        asked, killed = self._supervisor.grace()
        self._schedule(((asked, signal.SIGTERM), (killed, signal.SIGKILL)), now)

    def _schedule(self, steps: tuple[tuple[float, signal.Signals], ...], now: float) -> None:
        self._due = [(now + seconds, number) for seconds, number in steps]

    def _send_due(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, number = self._due.pop(0)
            self._asked = True
            for worker in self._running.values():
                if number == signal.SIGKILL:
                    worker.kill()
                else:
                    worker.send_signal(number)  # only the worker, which then ends its own child processes in order
            if number == signal.SIGKILL:
                self._due.append((now + _AGAIN_SECONDS, number))


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect stop signals to this process in a list during the block. Only the main thread can."""
    found: list[int] = []
    before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def keep(number: int, frame: FrameType | None) -> None:
        if not found or number != signal.SIGUSR1:  # a later SIGUSR1 is ignored: Slurm sends SIGTERM, too
            found.append(number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup and in a shell's background jobs
                before[number] = signal.signal(number, keep)
    try:
        yield found
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
