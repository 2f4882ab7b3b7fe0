"""Fault injection in this process. ``paceline.system.fault_points`` loads this module if a test requests faults."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.environments import env
from paceline.errors import ConfigError
from paceline.system.fault_points import Point
from paceline.testing.faults import Fault, Plan, read

_ALTERNATION_SECONDS = 0.02
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# Stops and continues its parent, which cannot continue itself. Ends with the parent, or when its standard input closes.
# For a single stop the parent stops itself, and the helper starts to count the pause only after the parent has stopped.
_HELPER = """
import os, select, signal, sys, time
pid, run, pause, again = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "True"
def runs():
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0] != "T"
    except OSError:
        return False
until = time.monotonic() + 60
while not again and runs() and os.getppid() == pid and time.monotonic() < until:
    time.sleep(0.005)
while not select.select([0], [], [], run)[0]:
    if again:
        os.kill(pid, signal.SIGSTOP)
    ended = select.select([0], [], [], pause)[0]
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        break
    if ended or not again:
        break
"""
_helpers: list[subprocess.Popen[bytes]] = []


def strike(fault: Fault) -> None:
    """Carry out a fault of any kind except ``slow``. Raises RuntimeError if the fault is an error."""
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        _stop(fault.seconds)
    elif fault.kind == "exit":
        os._exit(1 if fault.code is None else fault.code)
    elif fault.kind == "error":
        raise RuntimeError(fault.text)
    elif fault.kind == "drop network":
        drop_connections()
    elif fault.kind == "fill disk":
        _fill(Path(fault.under or "/"), fault.seconds)


def _stop(seconds: float | None) -> None:
    if seconds is not None:
        _start_helper(0.0, seconds, again=False)
    os.kill(os.getpid(), signal.SIGSTOP)


def slow_down(factor: float) -> subprocess.Popen[bytes]:
    """Make everything in this process take ``factor`` times as long, until :func:`speed_up`."""
    return _start_helper(_ALTERNATION_SECONDS, (factor - 1) * _ALTERNATION_SECONDS, again=True)


def speed_up(slowing: subprocess.Popen[bytes]) -> None:
    """Stop the slowdown that :func:`slow_down` started."""
    assert slowing.stdin is not None
    slowing.stdin.close()
    slowing.wait()


def _start_helper(run: float, pause: float, again: bool) -> subprocess.Popen[bytes]:
    """Start a helper process that ends when the pipe to it closes, at the latest when this process ends."""
    command = [sys.executable, "-I", "-S", "-c", _HELPER, str(os.getpid()), str(run), str(pause), str(again)]
    nowhere = subprocess.DEVNULL
    helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere)
    _helpers.append(helper)
    return helper


def drop_connections() -> int:
    """Shut down all TCP connections of this process and return their number."""
    dropped = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own entry is gone; a listening socket has no peer
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
                    dropped += 1
    return dropped


_full: list[tuple[str, float | None]] = []


def _fill(folder: Path, seconds: float | None) -> None:
    if not _full:
        sys.addaudithook(_refuse_writing)
    _full.append((os.path.realpath(folder), None if seconds is None else time.monotonic() + seconds))


def _refuse_writing(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise ENOSPC for a write under a full folder. An error raised in an audit hook becomes the error of the call."""
    if event not in ("open", "os.mkdir") or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    if event == "open" and not int(arguments[2] or 0) & _WRITING:
        return
    path = os.path.realpath(os.fsdecode(arguments[0]))
    for folder, until in _full:
        if (path == folder or path.startswith(folder + os.sep)) and (until is None or time.monotonic() < until):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def from_environment(text: str, rank: Callable[[], int]) -> OrderedFaults:
    """Return the faults of the plan in ``PACELINE_FAULTS``."""
    plan, run = read(text), env.run_directory()
    directory = plan.directory or (run / "faults" if run else None)
    if directory is None:
        raise ConfigError(f"{env.FAULTS} names no directory in which to mark injected faults.")
    return OrderedFaults(plan, directory, rank)


class OrderedFaults:
    """Faults of a plan that this process injects.

    Args:
        directory: directory in which files mark the faults that have happened.
    """

    def __init__(self, plan: Plan, directory: Path, rank: Callable[[], int]) -> None:
        self._faults = plan.faults
        self._directory, self._rank = directory, rank
        self._own: set[int] = set()
        self._slowing: dict[int, Any] = {}

    def reach(self, point: Point, step: int) -> None:
        """Inject the faults that are due at this point of this step."""
        for index, fault in enumerate(self._faults):
            if fault.point != point:
                continue
            if index in self._slowing and not fault.covers(step):
                speed_up(self._slowing.pop(index))
            if not fault.covers(step) or not self._has(index, fault, step):
                continue
            if fault.kind != "slow":
                strike(fault)
            elif fault.seconds is not None:
                time.sleep(fault.seconds)
            elif fault.factor is not None and index not in self._slowing:
                self._slowing[index] = slow_down(fault.factor)

    def _has(self, index: int, fault: Fault, step: int) -> bool:
        """Return whether to inject the fault in this process. A slow worker stays slow after its rank changes."""
        if index in self._own:
            return fault.kind == "slow"
        if fault.rank != self._rank() or not self._claim(index, step):
            return False
        self._own.add(index)
        return True

    def _claim(self, index: int, step: int) -> bool:
        """Mark a fault as done. Return True in only one process of the run."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            with (self._directory / f"{index}.json").open("x") as file:
                json.dump({"time": time.time(), "pid": os.getpid(), "rank": self._rank(), "step": step}, file)
        except FileExistsError:
            return False
        return True
