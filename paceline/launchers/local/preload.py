"""The launcher's end of the preloaded parent: start it, wait until it is ready, let it fork workers.

Whatever goes wrong with it, workers start the old way, each as a new Python; :attr:`Preload.problem` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from paceline.launchers.base import WorkerSpec
from paceline.launchers.local import child, messages, unsafe

_PARENT = Path(__file__).with_name("parent.py")
_READY_SECONDS = 120.0
"""To import torch, which takes a few seconds, and a minute from a slow network disk."""
_FORK_SECONDS = 20.0
_LOOK_SECONDS = 0.1
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class Preload:
    """One preloaded parent.

    Args:
        environment: of the workers, without what differs between them: libraries read it when they are loaded.
        cores: of the workers; empty: the system decides.
        words: the script and its arguments; they stand at the end of the command line, where ``ps`` shows them.
        folders: where the workers look for modules first.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self, environment: Mapping[str, str], cores: frozenset[int], words: Sequence[str], folders: Sequence[str]
    ) -> None:
        self.problem: str | None = None
        self._environment = environment
        self._script = words[0]
        self._ready = False
        self._until = time.monotonic() + _READY_SECONDS
        own, its = socket.socketpair()
        self._channel = own
        bound = "bound" if cores else "free"
        given = [str(its.fileno()), str(os.getpid()), bound, str(len(folders)), *folders, *words]
        command = (sys.executable, "-u", str(_PARENT), *given)
        with its, _output() as out, _output() as err:
            try:
                self._process = subprocess.Popen(
                    child.command_of(cores, command),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    pass_fds=[its.fileno()],
                )
            except BaseException:
                own.close()
                raise

    def wait(self, stop: Callable[[], bool]) -> bool:
        """Wait until the parent is ready to fork; false if it will never be, or if `stop` has become true."""
        while not self._ready and self.problem is None and not stop():
            if time.monotonic() > self._until:
                self._give_up(f"torch was not imported within {_READY_SECONDS:.0f} s")
            elif select.select([self._channel], [], [], _LOOK_SECONDS)[0]:
                self._ready = "ready" in self._answer()
        return self._ready and self.problem is None

    def fits(self, worker: WorkerSpec) -> bool:
        """Whether a fork becomes this worker: its interpreter, its script, and what libraries read of its variables."""
        command = (sys.executable, "-u", self._script)
        return worker.command[:3] == command and unsafe.same_libraries(worker.environment, self._environment)

    def fork(self, worker: WorkerSpec, stdout: int, stderr: int) -> int | None:
        """Start a worker as a child of this process; gives its process id, or None if that did not work."""
        if not self._ready or self.problem is not None:
            return None
        request: dict[str, object] = {
            "environment": dict(worker.environment),
            "command": list(worker.command),
            "directory": _directory(),
        }
        waits, go = os.pipe()
        try:
            with _adopting():
                pid = self._ask(request, (stdout, stderr, waits))
            if pid is not None:
                os.write(go, b"!")  # a worker that this process does not know of ends
        finally:
            os.close(waits)
            os.close(go)
        return pid

    def _ask(self, request: dict[str, object], files: tuple[int, ...]) -> int | None:
        try:
            self._channel.settimeout(_FORK_SECONDS)
            messages.send(self._channel, request, files)
        except OSError as error:
            self._give_up(f"the process that forks has ended ({error})")
            return None
        pid = self._answer().get("pid")
        return pid if isinstance(pid, int) else None

    def _answer(self) -> dict[str, object]:
        self._channel.settimeout(_FORK_SECONDS)
        try:
            received = messages.receive(self._channel)
        except ConnectionError:  # it was killed before it had read the request
            received = None
        except (OSError, ValueError) as error:
            received = {}, []
            self._give_up(f"the process that forks does not answer ({error})")
        if received is None:
            self._give_up("the process that forks has ended")
            return {}
        answer: dict[str, object] = received[0]
        if "refused" in answer:
            self._give_up(str(answer["refused"]))
        return answer

    def _give_up(self, reason: str) -> None:
        self.problem = self.problem or reason
        self.close()

    def close(self) -> None:
        """End the parent; its workers stay."""
        self._channel.close()
        self._ready = False
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


class Forked:
    """A worker that the parent has forked, in the manner of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the worker runs."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored, or somebody else has asked; as subprocess.Popen
                self._code = 0
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, number: int, /) -> None:
        """Send a signal to the worker alone."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the worker, and all processes of its group."""
        if self._code is None:  # it may not lead a group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def is_possible() -> bool:
    """Whether this system can do all of this."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and bool(sys.executable)


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


@contextlib.contextmanager
def _output() -> Iterator[int]:
    """A file of no name for what the parent prints while it imports."""
    opened = os.memfd_create("paceline-preload")
    try:
        yield opened
    finally:
        os.close(opened)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Adopt the processes whose parents end meanwhile, and only meanwhile: this process may be the user's own."""
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)
