"""A launcher in one file, as CONTRIBUTING describes it: each worker is started by ``posix_spawn``."""

import contextlib
import os
import signal

from paceline.launchers.base import Launcher, WorkerProcess, WorkerSpec


class SpawnedWorker:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class SpawnLauncher(Launcher):
    def start(self, worker: WorkerSpec, stdout: int, stderr: int) -> WorkerProcess:
        streams = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, stdout, 1),
            (os.POSIX_SPAWN_DUP2, stderr, 2),
        ]
        environment = dict(worker.environment)
        return SpawnedWorker(
            os.posix_spawn(worker.command[0], worker.command, environment, file_actions=streams, setsid=True)
        )
