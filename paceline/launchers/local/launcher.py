"""Launcher for workers that are processes of this machine.

Each worker leads its own session, so that it can be killed together with everything it started, such as data loaders.
If the launcher itself is killed, the kernel kills the workers (Linux), and a waiting shell kills their children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from paceline.launchers import call_worker
from paceline.launchers.base import Launch, Launcher, WorkerProcess, WorkerSpec
from paceline.launchers.local.child import command_of
from paceline.launchers.local.kernel import OutOfMemory
from paceline.launchers.local.preload import Forked, Preload, is_possible
from paceline.launchers.local.unsafe import needs_libraries

_REAPER = """
while read -r line; do
  case $line in
    done) exit ;;
    -*) left=; for group in $groups; do [ "-$group" = "$line" ] || left="$left $group"; done; groups=$left ;;
    *) groups="$groups $line" ;;
  esac
done
for group in $groups; do kill -KILL "-$group"; done
"""
"""Reads a worker's id when it starts, and its negative when it has ended: the id may then belong to another program."""


class LocalLauncher(Launcher):
    """Launcher that starts workers as child processes."""

    _early: ClassVar[Preload | None] = None

    @classmethod
    def begin_early(cls, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start to import torch for the workers of a later launch."""
        if is_possible() and needs_libraries(command[2]):
            with contextlib.suppress(OSError):
                cls._early = Preload(environment, frozenset(), command[2:], _module_folders(Path(command[2])))

    @classmethod
    def end_early(cls) -> None:
        if cls._early is not None:
            cls._early.close()
        cls._early = None

    def __init__(self) -> None:
        self._memory = OutOfMemory()
        self._reaper = _start_reaper()
        self._preloads: dict[frozenset[int], Preload] = {}
        """Preloaded parents by the cores that they share with their workers. Libraries count cores at load time."""

    def begin(self, launch: Launch) -> None:
        """Start to import torch once for all workers, or once per set of cores if workers are bound."""
        if not launch.preload or not is_possible() or not needs_libraries(str(launch.script)):
            return
        words, folders = launch.command()[2:], _module_folders(launch.script)
        for cores in {frozenset(one) for one in launch.cores} or {frozenset[int]()}:
            if (early := self._take_early(launch, cores)) is not None:
                self._preloads[cores] = early
                continue
            with contextlib.suppress(OSError):  # starting the workers then reports the system's limit
                self._preloads[cores] = Preload(launch.environment, cores, words, folders)
        self.end_early()

    def _take_early(self, launch: Launch, cores: frozenset[int]) -> Preload | None:
        """Return the process that was started early if it fits this launch, else None."""
        cls = type(self)
        early = cls._early
        if early is None or cores or not early.fits(WorkerSpec(0, launch.command(), launch.environment)):
            return None
        cls._early = None
        return early

    def wait_until_ready(self, stop: Callable[[], bool]) -> None:
        for cores, preload in list(self._preloads.items()):
            if not preload.wait(stop):
                self._forget(cores)

    def starts_at_once(self) -> bool:
        return bool(self._preloads)

    def _forget(self, cores: frozenset[int]) -> None:
        preload = self._preloads.pop(cores)
        preload.close()
        if preload.problem:
            self.note(f"note: each worker imports torch itself, which takes longer: {preload.problem}.")

    def start(self, worker: WorkerSpec, stdout: int, stderr: int) -> WorkerProcess:
        """Start a worker and register it with the reaper."""
        process = self.spawn(worker, stdout, stderr)
        self._tell_reaper(f"{process.pid}")
        return process

    def ended(self, worker: WorkerProcess) -> None:
        self._tell_reaper(f"-{worker.pid}")

    def _tell_reaper(self, line: str) -> None:
        if self._reaper is not None and self._reaper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._reaper.stdin.write(f"{line}\n".encode())
                self._reaper.stdin.flush()

    def spawn(self, worker: WorkerSpec, stdout: int, stderr: int) -> WorkerProcess:
        if (preload := self._preloads.get(worker.cores)) is not None and preload.fits(worker):
            if (pid := preload.fork(worker, stdout, stderr)) is not None:
                return Forked(pid)
            self._forget(worker.cores)
        return ChildProcess(
            command_of(worker.cores, worker.command),
            env=worker.environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process for lack of memory. Each kill is reported once."""
        return self._memory.again()

    def close(self) -> None:
        """End the reaper and the preloaded parents."""
        while self._preloads:
            self._preloads.popitem()[1].close()
        if self._reaper is not None:
            with contextlib.suppress(BrokenPipeError):
                self._reaper.communicate(b"done\n")


class ChildProcess(subprocess.Popen[bytes]):
    """Child process that leads its own session."""

    def kill(self) -> None:
        """Kill all processes of the session's first process group."""
        kill_group(self.pid)


def _module_folders(script: Path) -> list[str]:
    """Return the folders in which a script first looks for modules. ``call_worker`` also uses this ``sys.path``."""
    folders = [os.path.dirname(os.path.realpath(script))]
    if script == Path(call_worker.__file__):
        folders += [os.path.abspath(one) for one in sys.path]
    return folders


def kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _start_reaper() -> subprocess.Popen[bytes] | None:
    """Start a shell that is given each worker's id, and kills the workers' groups if the launcher is killed."""
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", _REAPER, "paceline-reaper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None  # without a shell, the kernel still kills the workers themselves
