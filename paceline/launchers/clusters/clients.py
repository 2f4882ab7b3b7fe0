"""Local client processes that run agents on other machines: ``ssh``, ``srun``, ``mpiexec``."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from paceline.environments import env
from paceline.errors import PREEMPTED, StartError
from paceline.launchers.clusters.base import Agent
from paceline.launchers.local.child import command_of
from paceline.launchers.local.launcher import kill_group
from paceline.launchers.output import Lines, ends_within
from paceline.launchers.workers import stop_signals

_POLL_SECONDS = 0.05
_LAST_SECONDS = 10.0
_SIGN_SECONDS = 2.0
_KILL_SECONDS = 2.0
_KEPT_LINES = 20
_SAY_SECONDS = 5.0


@dataclass(frozen=True)
class Client:
    """Specification of a client process."""

    name: str  # name of the machine, which prefixes each output line except for the first client
    command: Sequence[str]  # command to execute on this machine
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)  # additional variables
    # initial standard input. Empty lines follow as heartbeats. The line ``stop`` or the end of the input stops the
    # agent, and the end after ``stop`` kills it. None: the client has no input and forwards a signal.
    first_input: bytes | None = field(default=None, repr=False)
    stop: signal.Signals = signal.SIGTERM  # signal that asks a client without input to stop


Ended = Callable[[Client, int], bool]
"""Callback for an ended client and its exit code (negative for a signal). Returns whether the others continue."""
Again = Callable[[Client, int], float | None]
"""Callback for any ended client but the first. Returns the delay in seconds before its restart, or None."""
More = Callable[[], Sequence[Client]]
"""Callback, polled while the first client runs. Returns additional clients to start."""


def follow(
    clients: Sequence[Client],
    grace_seconds: float,
    ended: Ended,
    again: Again = lambda client, code: None,
    more: More = tuple,
) -> int:
    """Start all clients, forward their output, wait for all. Return the exit code of the first client.

    A first signal stops the run after a checkpoint. A second signal ends the run at once. On Linux the clients end
    with this process, even if it is killed.

    Args:
        ended: decides whether the other clients continue.
        again: decides whether a client that ended before the first client is restarted.

    Raises:
        StartError: a client could not be started. Clients that were started before are ended.
    """
    with stop_signals() as received:
        started = _Started(list(clients), grace_seconds, ended, again, more)
        try:
            started.start()
            while started.running and len(received) < 2 and time.monotonic() < started.deadline:
                started.poll()
                if received:
                    started.stop()
                time.sleep(_POLL_SECONDS)
        finally:
            started.close()
    code = started.codes.get(0, -signal.SIGKILL)
    return code if code >= 0 else 128 - code


def follow_agent(agent: Agent, grace_seconds: float) -> int:
    """Run an agent on this machine until it ends, as :func:`follow` does. Return its exit code."""
    client = Client(agent.machine, agent.command, agent.environment)
    return follow([client], grace_seconds, lambda client, code: False)


@dataclass
class _Started:
    """Running processes of clients, by their places in the list of clients. The arguments are those of ``follow``."""

    clients: list[Client]
    grace_seconds: float
    ended: Ended
    again: Again
    more: More
    due: dict[int, float] = field(default_factory=dict)
    sign_at: float = 0.0
    relays: list[threading.Thread] = field(default_factory=list)
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    deadline: float = math.inf

    def start(self) -> None:
        for place in range(len(self.clients)):
            self._start(place)

    def _start(self, place: int) -> None:
        client = self.clients[place]
        self.running[place] = process = _start(client)
        self.relays += _relay(process, f"[{client.name}] " if place else "")
        _write(process, client.first_input or b"")

    def poll(self) -> None:
        """Handle ended clients, start clients that are due, and send heartbeats."""
        now = time.monotonic()
        for place, process in list(self.running.items()):
            if (code := process.poll()) is not None:
                self._take_end(place, process, code)
        if 0 in self.running and self.deadline == math.inf:
            for place in [place for place, due in self.due.items() if due <= now]:
                del self.due[place]
                self._start(place)
            for client in self.more():
                self.clients.append(client)
                self._start(len(self.clients) - 1)
        if now >= self.sign_at:
            self.sign_at = now + _SIGN_SECONDS
            for process in self.running.values():
                _write(process, b"\n")

    def _take_end(self, place: int, process: subprocess.Popen[bytes], code: int) -> None:
        del self.running[place]
        self.codes[place] = code
        _close_input(process)
        client = self.clients[place]
        restarts = place and 0 in self.running and self.deadline == math.inf
        if restarts and (delay := self.again(client, code)) is not None:
            self.due[place] = time.monotonic() + delay
            return
        if not self.ended(client, code):
            self.stop()
        elif place == 0:  # the run is over, and the client of an unreachable machine would never end
            self.deadline = min(self.deadline, time.monotonic() + _LAST_SECONDS)

    def stop(self) -> None:
        """Ask all clients to end. Later calls have no effect."""
        if self.deadline < math.inf:
            return
        self.deadline = time.monotonic() + self.grace_seconds + _LAST_SECONDS
        for place, process in self.running.items():
            if self.clients[place].first_input is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(self.clients[place].stop)
            else:
                _write(process, b"stop\n")

    def close(self) -> None:
        """End the remaining clients and wait for their output."""
        for process in self.running.values():
            _close_input(process)
        until = time.monotonic() + _KILL_SECONDS
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.stdin is not None:
                    process.wait(max(0.0, until - time.monotonic()))
            kill_group(process.pid)
            process.wait()
        for relay in self.relays:
            ends_within(relay, _LAST_SECONDS)


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # the process has ended, or is about to end
            process.stdin.write(data)
            process.stdin.flush()


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _start(client: Client) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command_of(frozenset(), tuple(client.command)),
            env={**env.inherited(), **client.environment},
            stdin=subprocess.DEVNULL if client.first_input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise StartError(f"{client.command[0]} could not be started: {error.strerror}.") from None


def _relay(process: subprocess.Popen[bytes], prefix: str) -> list[threading.Thread]:
    """Forward the process's output in complete lines."""
    pipes = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    threads = [threading.Thread(target=_copy, args=(pipe, to, prefix), daemon=True) for pipe, to in pipes]
    for thread in threads:
        thread.start()
    return threads


def _copy(pipe: IO[bytes], to: IO[str], prefix: str) -> None:
    """Forward a pipe until its end, in complete lines."""
    lines = Lines()
    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            _print(lines.take(data), to, prefix)
    _print(lines.rest(), to, prefix)


def _print(lines: list[str], to: IO[str], prefix: str) -> None:
    if lines:
        to.write("".join(f"{prefix}{line}\n" for line in lines))
        to.flush()


def run_here(command: Sequence[str], environment: Mapping[str, str], folder: str | Path) -> tuple[int, str]:
    """Run an agent on this machine, in a process that an engine has started. Return exit code and last output lines.

    Removes OMP_NUM_THREADS, which engines set for their own processes and not for workers.
    """
    inherited = {name: value for name, value in env.inherited().items() if name != "OMP_NUM_THREADS"}
    with subprocess.Popen(
        command_of(frozenset(), (sys.executable, *command[1:])),
        env={**inherited, **environment},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        last = deque(process.stdout, _KEPT_LINES)
    return process.returncode, "".join(last)


def say(line: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def say_end(machine: str, code: int, last: str, over: threading.Event) -> None:
    """Print the last lines of an agent that failed, unless the run is over soon after that and reports the reason."""
    if code not in (0, PREEMPTED) and not over.wait(_SAY_SECONDS):
        for line in last.splitlines():
            say(f"[{machine}] {line}")
