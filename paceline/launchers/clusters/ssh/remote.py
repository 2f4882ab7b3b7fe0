"""Program that runs on remote machines: the check before the start, and the leash of the agent.

It is sent as text and needs only Python's standard library. The first line of the standard input is this file, and the
second line is the order. Both are JSON.

The leash ends the agent if the connection ends for any reason. Otherwise the agent would keep running, because it does
not notice the loss itself, and without a terminal the SSH server does not end it::

    line "stop"                   SIGTERM: the workers save a checkpoint; SIGKILL after the grace period
    end of input after that       SIGKILL
    end of input, or no line for  the launcher is gone: as "stop"
    SILENT_SECONDS
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import IO, Any

BOOT = 'exec(__import__("json").loads(open(0,"rb",0,closefd=False).readline()))'
"""Runs this file. Contains no single quote, so any shell can quote it, and reads exactly one line of the input."""
MARK = "paceline-check "  # prefix of each answer, because a shell's startup file may print too
SILENT_SECONDS = 20.0
_LAST_SECONDS = 10.0
_CONNECT_SECONDS = 3.0
_IMPORT = "import importlib.metadata, paceline.cli; print(importlib.metadata.version('paceline'))"
_CANNOT_START = 3
_SIOCGIFADDR = 0x8915
_PR_SET_PDEATHSIG = 1

Order = dict[str, Any]


def check(order: Order, orders: IO[bytes]) -> None:
    """Report which requirements this machine meets, then test addresses of the first machine on request."""
    facts: Order = {"addresses": _addresses(), "connection": os.environ.get("SSH_CONNECTION", "").split()}
    try:
        os.chdir(order["directory"])
    except OSError as error:
        facts["directory"] = error.strerror
    else:
        facts["missing"] = [name for name in order["files"] if not os.path.isfile(name)]
        ended = subprocess.run(
            [order["python"], "-c", _IMPORT],
            env={**os.environ, **order["environment"]},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        facts["paceline"] = ended.stdout.strip() if ended.returncode == 0 else None
        facts["why"] = (ended.stderr.strip().splitlines() or [""])[-1]
    with contextlib.ExitStack() as open_sockets:
        if order["ports"]:
            listener = open_sockets.enter_context(_listen(order["ports"]))
            facts["port"] = listener.getsockname()[1]
            threading.Thread(target=_answer, args=(listener, order["token"]), daemon=True).start()
        _say(facts)
        while line := orders.readline():
            again = json.loads(line)
            _say({one: _try(one, again["port"], order["token"]) for one in again["addresses"]})


def _say(answer: Order) -> None:
    print(MARK + json.dumps(answer), flush=True)  # noqa: T201 - the launcher reads it


def _addresses() -> list[str]:
    """Return the IPv4 addresses of this machine except loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [one for one in found if not one.startswith("127.")]


def _listen(ports: list[int]) -> socket.socket:
    """Listen on the first free port of `ports`, or else on any free port."""
    for port in [*ports, 0]:
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), backlog=128)  # the coordinator can reuse the address at once
    raise AssertionError("port 0 is always free")


def _answer(listener: socket.socket, token: str) -> None:
    with contextlib.suppress(OSError):  # the listener was closed
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(token.encode())


def _try(address: str, port: int, token: str) -> str:
    """Connect to the first machine. Return ``reached``, ``here`` if it is this machine, or the reason for failure."""
    try:
        with socket.create_connection((address, port), _CONNECT_SECONDS) as connection:
            if connection.makefile().read(len(token)) != token:
                return "another program answers there"
            return "here" if connection.getsockname()[0] == address else "reached"
    except OSError as error:
        return error.strerror or str(error)


def leash(order: Order) -> int:
    """Run the agent until it ends, or end it if the launcher disappears. Return its exit code."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: None)  # the wakeup pipe carries the signal
    try:
        os.chdir(order["directory"])
        agent = subprocess.Popen(
            order["command"],
            env={**os.environ, **order["environment"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        sys.stderr.write(f"{error.filename or order['command'][0]}: {error.strerror}\n")
        return _CANNOT_START
    pipes = ((agent.stdout, 1), (agent.stderr, 2))
    copies = [threading.Thread(target=_copy, args=pipe, daemon=True) for pipe in pipes]
    for thread in copies:
        thread.start()
    _hold(agent, wake, order["grace"])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(agent.pid, signal.SIGKILL)  # processes that the agent left behind
    for thread in copies:
        thread.join(_LAST_SECONDS / 5)
    return agent.returncode if agent.returncode >= 0 else 128 - agent.returncode


def _hold(agent: subprocess.Popen[bytes], wake: int, grace_seconds: float) -> None:
    """Wait until the agent ends. Stop or kill it by the rules of the module."""
    watched = [0, wake]
    asked, until = False, time.monotonic() + SILENT_SECONDS  # end of heartbeats, later of the grace period
    stopping = False
    while agent.poll() is None:
        ready, _, _ = select.select(watched, [], [], max(0.0, until - time.monotonic()))
        data = os.read(0, 4096) if 0 in ready else None
        signals = os.read(wake, 64) if wake in ready else b""
        if data == b"":
            watched = [wake]
        if (stopping and time.monotonic() >= until) or (asked and data == b""):
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
        elif not stopping:
            asked = b"stop" in (data or b"")
            stopping = asked or data == b"" or time.monotonic() >= until or bool(set(signals) - {signal.SIGCHLD})
            if stopping:
                agent.send_signal(signal.SIGTERM)
                until = time.monotonic() + grace_seconds + _LAST_SECONDS
            elif data:
                until = time.monotonic() + SILENT_SECONDS


def _copy(pipe: IO[bytes], to: int) -> None:
    """Forward the agent's output. Discard it once the reader is gone, so that the agent does not block."""
    broken = False
    while data := os.read(pipe.fileno(), 1 << 16):
        try:
            while data and not broken:
                data = data[os.write(to, data) :]
        except OSError:
            broken = True


def main() -> None:
    """Execute the order in the next line of the standard input."""
    with open(0, "rb", buffering=0) as orders:  # unbuffered, to read exactly one line
        order = json.loads(orders.readline())
        if "command" in order:
            sys.exit(leash(order))
        check(order, orders)


if __name__ == "__main__":
    main()
