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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from paceline.environments import env
from paceline.launchers import registry
from paceline.launchers.base import Launch, WorkerSpec
from paceline.launchers.local import become
from paceline.launchers.local.child import end_with_parent
from paceline.launchers.local.launcher import LocalLauncher, kill_group
from paceline.testing.ranks import Worker

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read by torch when it is imported, which is after this
"""Tests have more threads than cores: with threads that wait busily, small tensors took 5 times as much CPU time."""
HERE = Path(__file__).resolve().parent
PATHS = (HERE.parent, HERE, HERE / "core", HERE / "recovery")
MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "paceline.session",
    "paceline.cli.run",
    "subjects",
    "scripted",
)
PACELINE = ("-m", "paceline.cli.main")
"""The first words of a command that is to be ``paceline``; what follows them are its arguments."""

SHOW_THREADS = signal.SIGUSR2
"""Makes a forked process print where its threads are."""

_PR_SET_CHILD_SUBREAPER = 36
_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Command:
    """A Python to start: a script and its arguments, or ``PACELINE`` and those of the command."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    out: Path
    err: Path
    directory: Path | None = None


class ForkServer:
    """The process that has imported torch; used as a context. What is started together must end before the next."""

    def __enter__(self) -> ForkServer:
        environment = os.environ | {"PYTHONPATH": ":".join(map(str, PATHS)), "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._read = b""
        assert self.line() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
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
        codes: dict[int, int] = {}
        return [Forked(self, int(self.line()), codes) for _ in commands]

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

    def __init__(self, server: ForkServer, pid: int, codes: dict[int, int]) -> None:
        self._server = server
        self._codes = codes  # of all that were started together, by their id
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
        while self.pid not in self._codes:
            pid, code = self._server.line(None if until is None else max(0.0, until - time.monotonic())).split()
            self._codes[int(pid)] = int(code)
        return self._codes[self.pid]

    def send_signal(self, number: int) -> None:
        """Send a signal to it."""
        if self.poll() is None:
            os.kill(self.pid, number)


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent ends, so that none goes unnoticed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def serve() -> None:
    """Fork what each line of JSON asks for; print the ids, then each id with its exit code."""
    adopt_orphans()
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # no fork visits, and so copies, what is there already
    print("ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        running = set()
        for command in json.loads(line):
            pid = os.fork()
            if pid == 0:
                _become(command)
            running.add(pid)
            print(pid, flush=True)
        while running:
            pid, status = os.wait()
            if pid in running:
                running.remove(pid)
                print(pid, os.waitstatus_to_exitcode(status), flush=True)


def _become(command: dict[str, Any]) -> NoReturn:
    """Be the process that was asked for."""
    code = 1
    try:
        os.setsid()
        if command["directory"]:
            os.chdir(command["directory"])
        _take(command["environment"], *(os.open(command[name], os.O_WRONLY | os.O_APPEND) for name in ("out", "err")))
        words = tuple(command["words"])
        code = _run_paceline(words[2:]) if words[:2] == PACELINE else _run_script(words)
    finally:
        _end(code)


def _take(environment: Mapping[str, str], out: int, err: int) -> None:
    env.replace(environment)
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

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        if self._code is None:  # it may not lead a group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        kill_group(self.pid)


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
