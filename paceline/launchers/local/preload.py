"""Launcher's side of the preloaded parent: start it, wait until it is ready, request forks.

If the parent fails for any reason, each worker starts as a new Python. :attr:`Preload.problem` gives the reason.
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
"""Timeout for the import of torch, which takes a few seconds, or a minute from a slow network disk."""
_FORK_SECONDS = 20.0
_POLL_SECONDS = 0.1
_ENDED = "the process that forks has ended"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class Preload:
    """Handle of one preloaded parent.

    Args:
        environment: variables that all workers share, which libraries read at load time.
        cores: cores of the workers. Empty if the workers are not bound.
        words: script and its arguments, appended to the parent's command line so that ``ps`` shows them.
        folders: folders in which the workers first look for modules.

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
        """Wait until the parent is ready to fork. Return False if it has failed or `stop` returns true."""
        while not self._ready and self.problem is None and not stop():
            if select.select([self._channel], [], [], _POLL_SECONDS)[0]:  # first: this process may have been stopped
                self._ready = "ready" in self._answer()
            elif time.monotonic() > self._until:
                self._give_up(f"torch was not imported within {_READY_SECONDS:.0f} s")
        return self._ready and self.problem is None

    def fits(self, worker: WorkerSpec) -> bool:
        """Return whether a fork can become this worker: same interpreter, script and load-time variables."""
        command = (sys.executable, "-u", self._script)
        return worker.command[:3] == command and unsafe.same_libraries(worker.environment, self._environment)

    def fork(self, worker: WorkerSpec, stdout: int, stderr: int) -> int | None:
        """Start a worker as a child of this process. Return its process id, or None on failure."""
        if not self._ready or self.problem is not None:
            return None
        request: dict[str, object] = {
            "environment": dict(worker.environment),
            "command": list(worker.command),
            "directory": child.current_directory(),
        }
        waits, go = os.pipe()
        try:
            with _adopting():
                pid = self._ask(request, (stdout, stderr, waits))
            if pid is not None:
                os.write(go, b"!")  # without this byte, the worker exits
        finally:
            os.close(waits)
            os.close(go)
        return pid

    def _ask(self, request: dict[str, object], files: tuple[int, ...]) -> int | None:
        try:
            self._channel.settimeout(_FORK_SECONDS)
            messages.send(self._channel, request, files)
        except ConnectionError:
            self._give_up(_ENDED)
            return None
        except OSError as error:
            self._give_up(f"the process that forks does not read ({error})")
            return None
        pid = self._answer().get("pid")
        return pid if isinstance(pid, int) else None

    def _answer(self) -> dict[str, object]:
        self._channel.settimeout(_FORK_SECONDS)
        try:
            received = messages.receive(self._channel)
        except ConnectionError:  # the parent was killed before it had read the request
            received = None
        except (OSError, ValueError) as error:
            received = {}, []
            self._give_up(f"the process that forks does not answer ({error})")
        if received is None:
            self._give_up(_ENDED)
            return {}
        answer: dict[str, object] = received[0]
        if "refused" in answer:
            self._give_up(str(answer["refused"]))
        return answer

    def _give_up(self, reason: str) -> None:
        self.problem = self.problem or reason
        self.close()

    def close(self) -> None:
        """End the parent. Its workers keep running."""
        self._channel.close()
        self._ready = False
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


class Forked:
    """Worker that the parent has forked, with the interface of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal), or None while the worker runs."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored, or other code has reaped it; 0 as in subprocess.Popen
                self._code = 0
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, number: int, /) -> None:
        """Send a signal to the worker process only."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the worker and all processes of its group."""
        if self._code is None:  # the worker may not lead a process group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def is_possible() -> bool:
    """Return whether this system supports preloading."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and bool(sys.executable)


@contextlib.contextmanager
def _output() -> Iterator[int]:
    """Open an anonymous file for the parent's output during the imports."""
    opened = os.memfd_create("paceline-preload")
    try:
        yield opened
    finally:
        os.close(opened)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Adopt orphaned descendants during the ``with`` block only, because this process may belong to the user."""
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)
