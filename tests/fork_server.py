"""Processes forked from one that has imported torch already: a worker starts in 0.05 s instead of 3 s.

All else is as it is for a user: each is a process of its own with its own environment, pipes and exit code, and the
script is its main module. A launcher that is started here forks its workers too: :class:`ForkLauncher` stands for
the local one in the registry.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from paceline.comm.collectives import agreement
from paceline.environments import env
from paceline.launchers import registry
from paceline.launchers.base import Launch, WorkerSpec
from paceline.launchers.clusters import registry as clusters
from paceline.launchers.local import become
from paceline.launchers.local.child import end_with_parent
from paceline.launchers.local.launcher import LocalLauncher, kill_group
from paceline.system import user_code
from paceline.testing import ranks
from paceline.testing.ranks import Worker

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read by torch when it is imported, which is after this
"""Tests have more threads than cores: with threads that wait busily, small tensors took 5 times as much CPU time."""
HERE = Path(__file__).resolve().parent
PATHS = (HERE.parent, HERE, HERE / "core", HERE / "recovery")
MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "paceline.session",
    *("paceline.cli.main", "paceline.cli.run", "paceline.cli.display.progress", "paceline.coordinator.agent"),
    *("paceline.coordinator.machines", "paceline.diagnostics.doctor.start", "paceline.launchers.prepare"),
    *("paceline.launchers.workers", "paceline.observe.why.at_end", "encodings.idna"),
    *("paceline.cli.display.alerts", "paceline.testing.faults"),
    "subjects",
    "scripted",
)
"""What a worker and a launcher import: a launcher takes 0.05 s for what is not imported here."""
PACELINE = ("-m", "paceline.cli.main")
"""The first words of a command that is to be ``paceline``; what follows them are its arguments."""

SHOW_THREADS = signal.SIGUSR2
"""Makes a forked process print where its threads are."""

_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET = 0x40000000
_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Command:
    """A Python to start: a script and its arguments, or ``PACELINE`` and those of the command."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    out: Path
    err: Path
    directory: Path | None = None
    network: str = ""
    """The name of a network namespace, as ``ip netns`` knows it."""


class ForkServer:
    """The process that has imported torch; used as a context."""

    used: ForkServer | None = None

    def __enter__(self) -> ForkServer:
        environment = os.environ | {"PYTHONPATH": ":".join(map(str, PATHS)), "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._read = b""
        self.codes: dict[int, int] = {}  # of the processes that have ended, by their id
        assert self.line() == "ready"
        ForkServer.used = self
        return self

    def __exit__(self, *_: object) -> None:
        ForkServer.used = None
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def start(self, commands: Sequence[Command]) -> list[Forked]:
        """Start them all."""
        asked = [
            {
                "words": command.words,
                "environment": dict(command.environment),
                "out": str(command.out),
                "err": str(command.err),
                "directory": str(command.directory or ""),
                "network": command.network,
            }
            for command in commands
        ]
        for command in commands:
            for path in (command.out, command.err):
                path.write_bytes(b"")
        assert self._server.stdin is not None
        try:
            left = json.dumps(asked).encode() + b"\n"
            while left:  # a write without a buffer may take a part, as when this process is stopped meanwhile
                left = left[self._server.stdin.write(left) :]
        except BrokenPipeError:
            raise AssertionError(self._ended()) from None
        started: list[Forked] = []
        while len(started) < len(commands):
            if pid := self.take_line():
                started.append(Forked(self, pid))
        return started

    def take_line(self, seconds: float | None = None) -> int | None:
        """Take the next line; gives the id of a process that has started, and keeps the code of one that has ended."""
        pid, *code = map(int, self.line(seconds).split())
        if code:
            self.codes[pid] = code[0]
            return None
        self.codes.pop(pid, None)
        return pid

    def start_workers(self, workers: list[Worker]) -> list[Forked]:
        """For :func:`paceline.testing.ranks.run`."""
        return self.start([Command((str(one.script),), one.environment, one.out, one.err) for one in workers])

    def run(self, command: Command, seconds: float) -> int:
        """Start one, and wait until it has ended; gives its exit code. What takes longer is killed."""
        (process,) = self.start([command])
        try:
            return process.wait(seconds)
        except TimeoutError:
            process.send_signal(signal.SIGKILL)
            process.wait()
            raise

    def _ended(self) -> str:
        """What a failed test says of a server that has ended, which nothing here does to it."""
        return f"the process that forks ({self._server.pid}) has ended with exit code {self._server.wait()}"

    def line(self, seconds: float | None = None) -> str:
        """The next line of the server, without reading ahead."""
        assert self._server.stdout is not None
        stream = self._server.stdout.fileno()
        until = None if seconds is None else time.monotonic() + seconds
        while not self._read.endswith(b"\n"):
            if until is not None and not select.select([stream], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError
            byte = os.read(stream, 1)
            assert byte, self._ended()
            self._read += byte  # kept if the time is up in the middle of a line
        read, self._read = self._read, b""
        return read.decode().strip()


class Forked:
    """A process that the server has started, in the manner of ``subprocess.Popen``."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self._code: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        """The exit code; none while it runs."""
        try:
            return self.wait(0.0)
        except TimeoutError:
            return None

    def wait(self, seconds: float | None = None) -> int:
        """Wait until it has ended; gives the exit code."""
        until = None if seconds is None else time.monotonic() + seconds
        while self._code is None:
            if self.pid in self._server.codes:
                self._code = self._server.codes[self.pid]
            else:
                self._server.take_line(None if until is None else max(0.0, until - time.monotonic()))
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal to it."""
        if self.poll() is None:
            os.kill(self.pid, number)


def forked(workers: list[Worker]) -> list[Forked]:
    """Start the processes of ``processes(start=forked)``, in a test that uses the fixture ``fork_server``."""
    assert ForkServer.used is not None
    return ForkServer.used.start_workers(workers)


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent ends, so that none goes unnoticed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def serve() -> None:
    """Fork what each line of JSON asks for; print the ids, and each id with its exit code when it has ended."""
    adopt_orphans()
    for name in MODULES:
        importlib.import_module(name)
    for name in clusters.PLACES:
        clusters.place_named(name)
    user_code.script_modules()  # keeps which modules are installed
    agreement.versions()  # keeps them; each worker would take 4 ms
    importlib.import_module("paceline.step.numerics").canary()  # the same, 10 ms; it imports torch
    gc.collect()
    gc.freeze()  # no fork visits, and so copies, what is there already
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    print("ready", flush=True)
    running, asked = set[int](), True
    while asked or running:
        ready = select.select([ended, *([sys.stdin] if asked else [])], [], [])[0]
        if ended in ready:
            os.read(ended, 4096)
            for pid, code in _reaped():
                if pid in running:
                    running.remove(pid)
                    print(pid, code, flush=True)
        if sys.stdin in ready:
            line = sys.stdin.readline()
            asked = bool(line)
            for command in json.loads(line or "[]"):
                pid = os.fork()
                if pid == 0:
                    _become(command, (ended, wake))
                running.add(pid)
                print(pid, flush=True)


def _reaped() -> Iterator[tuple[int, int]]:
    """The processes that have ended, orphans among them, with their exit codes."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def _become(command: dict[str, Any], opened: tuple[int, int]) -> NoReturn:
    """Be the process that was asked for."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in opened:
            os.close(number)
        os.setsid()
        if command["network"]:
            _enter(command["network"])
        if command["directory"]:
            os.chdir(command["directory"])
        _take(command["environment"], *(os.open(command[name], os.O_WRONLY | os.O_APPEND) for name in ("out", "err")))
        words = tuple(command["words"])
        code = _run_paceline(words[2:]) if words[:2] == PACELINE else _run_script(words)
    except BaseException:  # noqa: BLE001 - torch raises at any time when a loader process ends, also in a report
        sys.__excepthook__(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        _end(code)


def _enter(network: str) -> None:
    namespace = os.open(f"/run/netns/{network}", os.O_RDONLY)
    assert ctypes.CDLL(None).setns(namespace, _CLONE_NEWNET) == 0
    os.close(namespace)


def _take(environment: Mapping[str, str], out: int, err: int) -> None:
    env.replace({"OMP_NUM_THREADS": "1", **environment})  # with 2, a step of a small model took 4 times the CPU time
    become.take_output(out, err)
    become.reseed()
    # The process that forked cleans up what is its own: temporary folders, and torch's libraries, which takes 0.05 s.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    faulthandler.register(SHOW_THREADS, file=sys.stderr, all_threads=True)


def _run_paceline(words: Sequence[str]) -> int:
    from paceline.cli.main import main

    registry.register("local", ForkLauncher)
    return _code_of(lambda: main(list(words)))


def _run_script(words: Sequence[str]) -> int:
    """Run a script as the main module, as Python does; gives the exit code."""

    def run() -> None:
        code, names = become.main_module((sys.executable, "-u", *words), list(sys.path))
        exec(code, names)

    return _code_of(run)


def _code_of(call: Callable[[], object]) -> int:
    try:
        call()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - it ends the process, as it would end Python
        code = _report(error)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else code
    return 0


def _report(error: BaseException) -> int:
    """Call the hook for what nobody has caught; what goes wrong in it is printed, as Python does.

    Returns:
        the exit code of the process, which the hook may choose.
    """
    sys.last_value = error  # as Python does
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - a handler of signals may raise anything
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(*sys.exc_info())  # type: ignore[arg-type]
    return 1


def _end(code: int) -> NoReturn:
    """End as Python does, but for taking all modules apart, which copies their memory for seconds."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


class ForkLauncher(LocalLauncher):
    """The local launcher, but for how it starts a worker: it is itself what forks."""

    @classmethod
    def begin_early(cls, command: Sequence[str], environment: Mapping[str, str]) -> None:
        pass

    def begin(self, launch: Launch) -> None:
        pass

    def spawn(self, worker: WorkerSpec, stdout: int, stderr: int) -> ForkedWorker:
        return ForkedWorker(worker, stdout, stderr)


class ForkedWorker:
    """A worker of a forked launcher."""

    def __init__(self, worker: WorkerSpec, out: int, err: int) -> None:
        self._code: int | None = None
        launcher = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _be_worker(worker, launcher, out, err)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> None:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        if self._code is None:  # it may not lead a group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        kill_group(self.pid)


def fork_workers() -> None:
    """Have this process fork what it starts with ``paceline.launch`` and ``paceline.testing.run``."""
    registry.register("local", ForkLauncher)
    ranks.start_new = _fork_each


def _fork_each(workers: list[Worker]) -> list[ForkedWorker]:
    started = []
    for worker in workers:
        with worker.out.open("wb") as out, worker.err.open("wb") as err:
            command = (sys.executable, "-u", str(worker.script))
            spec = WorkerSpec(worker.rank, command, worker.environment)
            started.append(ForkedWorker(spec, out.fileno(), err.fileno()))
    return started


def _be_worker(worker: WorkerSpec, launcher: int, out: int, err: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        end_with_parent()
        if os.getppid() != launcher:
            os._exit(1)
        if worker.cores:
            os.sched_setaffinity(0, worker.cores)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _take(worker.environment, out, err)
        for opened in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2}:
            os.dup2(0, opened, inheritable=False)  # what the launcher had open; objects here may still name it
        code = _run_script(worker.command[2:])
    finally:
        _end(code)


if __name__ == "__main__":
    serve()
