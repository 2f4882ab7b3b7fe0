"""Processes of this machine by which an engine runs agents elsewhere: ``ssh``, ``srun``, ``mpiexec``."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from paceline.errors import StartError
from paceline.launchers.child import command_of
from paceline.launchers.local import kill_group
from paceline.launchers.output import Lines

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_LOOK_SECONDS = 0.05
_LAST_SECONDS = 10.0


@dataclass(frozen=True)
class Client:
    """How one is started, and stopped.

    Attributes:
        name: of the machine; before each line that it prints, except for the first client.
        command: what is executed here.
        environment: more variables.
        stop_by_signal: whether it passes a signal on; else the end of its standard input stops what it runs.
        stop: that signal.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    stop_by_signal: bool = True
    stop: signal.Signals = signal.SIGTERM


Ended = Callable[[Client, int], bool]
"""Called when one has ended, with its exit code (negative: a signal); whether the others go on."""


def follow(clients: Sequence[Client], inherited: Mapping[str, str], grace_seconds: float, ended: Ended) -> int:
    """Start all, pass on what they print, wait for all, and give the exit code of the first.

    A first signal stops the run after a checkpoint; a second one ends it at once. They end with this process, however
    that ends, if the system can do that.

    Args:
        clients: the one with the coordinator first.
        inherited: the environment that all get.
        grace_seconds: from the first signal to the last one.
        ended: decides what becomes of the others.

    Raises:
        StartError: one could not be started; those before it are ended.
    """
    with stop_signals() as signals:
        started = _Started(clients, grace_seconds, ended)
        try:
            started.start(inherited)
            while started.running and len(signals) < 2 and time.monotonic() < started.deadline:
                started.look()
                if signals:
                    started.stop()
                time.sleep(_LOOK_SECONDS)
        finally:
            started.close()
    code = started.codes.get(0, -signal.SIGKILL)
    return code if code >= 0 else 128 - code


class _Started:
    """The processes of some clients."""

    def __init__(self, clients: Sequence[Client], grace_seconds: float, ended: Ended) -> None:
        self._clients = clients
        self._grace_seconds = grace_seconds
        self._ended = ended
        self._relays: list[threading.Thread] = []
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.codes: dict[int, int] = {}
        self.deadline = math.inf

    def start(self, inherited: Mapping[str, str]) -> None:
        for place, client in enumerate(self._clients):
            self.running[place] = _start(client, inherited)
            self._relays += _relay(self.running[place], f"[{client.name}] " if place else "")

    def look(self) -> None:
        """Take note of those that have ended."""
        for place, process in list(self.running.items()):
            if (code := process.poll()) is not None:
                del self.running[place]
                self.codes[place] = code
                _close_input(process)
                if not self._ended(self._clients[place], code):
                    self.stop()

    def stop(self) -> None:
        """Ask all to end, once."""
        if self.deadline < math.inf:
            return
        self.deadline = time.monotonic() + self._grace_seconds + _LAST_SECONDS
        for place, process in self.running.items():
            if self._clients[place].stop_by_signal:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(self._clients[place].stop)
            else:
                _close_input(process)

    def close(self) -> None:
        """End those that are left."""
        for process in self.running.values():
            kill_group(process.pid)
            process.wait()
            _close_input(process)
        for relay in self._relays:
            relay.join(_LAST_SECONDS)


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _start(client: Client, inherited: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command_of(frozenset(), tuple(client.command)),
            env={**inherited, **client.environment},
            stdin=subprocess.DEVNULL if client.stop_by_signal else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise StartError(f"{client.command[0]} could not be started: {error.strerror}.") from None


def _relay(process: subprocess.Popen[bytes], prefix: str) -> list[threading.Thread]:
    """Pass on what it prints, in whole lines."""
    pipes = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    threads = [threading.Thread(target=_copy, args=(pipe, to, prefix), daemon=True) for pipe, to in pipes]
    for thread in threads:
        thread.start()
    return threads


def _copy(pipe: IO[bytes], to: IO[str], prefix: str) -> None:
    lines = Lines()
    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            _print(lines.take(data), to, prefix)
    _print(lines.rest(), to, prefix)


def _print(lines: list[str], to: IO[str], prefix: str) -> None:
    if lines:
        to.write("".join(f"{prefix}{line}\n" for line in lines))
        to.flush()


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The signals to this process that ask for the end, as they come."""
    found: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        found.append(number)

    before = {one: signal.signal(one, keep) for one in _STOPPING}
    try:
        yield found
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
