"""Workers as processes of this machine.

Each worker leads a session of its own, so that it can be killed with everything it started, data loaders included.
When the launcher itself is killed, the kernel kills the workers (Linux) and a waiting shell what they started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

from paceline.launchers.base import Launcher, WorkerProcess, WorkerSpec
from paceline.launchers.child import command_of
from paceline.launchers.kernel import OutOfMemory

_REAPER = """
while read -r line; do
  [ "$line" = done ] && exit
  groups="$groups $line"
done
for group in $groups; do kill -KILL "-$group"; done
"""


class LocalLauncher(Launcher):
    """Starts child processes."""

    def __init__(self) -> None:
        self._memory = OutOfMemory()
        self._reaper = _start_reaper()

    def start(self, worker: WorkerSpec, stdout: int, stderr: int) -> WorkerProcess:
        """Start a worker, known to the reaper."""
        process = self.spawn(worker, stdout, stderr)
        if self._reaper is not None and self._reaper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._reaper.stdin.write(f"{process.pid}\n".encode())
                self._reaper.stdin.flush()
        return process

    def spawn(self, worker: WorkerSpec, stdout: int, stderr: int) -> WorkerProcess:
        """Start the process itself."""
        return ChildProcess(
            command_of(worker.cores, worker.command),
            env=worker.environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed a process since this was asked last."""
        return self._memory.again()

    def close(self) -> None:
        """End the reaper."""
        if self._reaper is not None:
            with contextlib.suppress(BrokenPipeError):
                self._reaper.communicate(b"done\n")


class ChildProcess(subprocess.Popen[bytes]):
    """The leader of a session."""

    def kill(self) -> None:
        """Kill all processes of the session's first group."""
        kill_group(self.pid)


def kill_group(leader: int) -> None:
    """Kill a process group, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _start_reaper() -> subprocess.Popen[bytes] | None:
    """Start a shell that learns of each worker, and kills what they started if the launcher is killed."""
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", _REAPER, "paceline-reaper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None  # no shell here: the kernel still kills the workers themselves
