"""Runs on several machines: rendezvous address, location of the coordinator, and joining of other machines.

Each machine runs the same command. The machine with the address of ``--rendezvous`` holds the coordinator. The agents
of the other machines connect to it at any time and start their workers. If the coordinator's machine is lost, the
membership is unknown: the other agents end their workers and wait until that machine is back.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from paceline.coordinator.types import LONGEST_TEXT, Message
from paceline.coordinator.wire.authentication import AGENT, NotAuthenticated, Refused
from paceline.coordinator.wire.messages import Connection, connect, decode, encode, listen
from paceline.environments import env
from paceline.errors import ConfigError, StartError
from paceline.system import secret as secrets
from paceline.system.secret import Secret, Shared

_TRY_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.05
_LISTEN_TRIES = 5
_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous of the machines of a run: host name, its resolved address, and port."""

    name: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"


def parse_rendezvous(text: str, patience_seconds: float = 0.0) -> Rendezvous:
    """Parse ``host:port`` and resolve the host.

    Args:
        patience_seconds: time in seconds to wait until the name has an address. Defaults to a single try.
    """
    name, _, port = text.rpartition(":")
    if not name or not port.isdecimal() or len(port) > 5 or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--rendezvous {text}: give the name and a port of the first machine, as in node1:29500.")
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return Rendezvous(name, _address_of(name), int(port))
        except (socket.gaierror, UnicodeError) as error:  # UnicodeError: an invalid host name
            why = getattr(error, "strerror", None) or error
        if time.monotonic() >= deadline:
            raise StartError(
                f"--rendezvous {text}: the name {name!r} has no address ({why}). Check the spelling, or give "
                f"the address itself; `getent hosts {name}` shows what this machine knows."
            )
        time.sleep(_TRY_SECONDS)


def _address_of(name: str) -> str:
    """Return the IPv4 address of a host. For this host, prefer its own, which the name service may not know yet."""
    own = socket.gethostname()
    if name.partition(".")[0] == own:
        with contextlib.suppress(socket.gaierror):
            address = _resolve(own)
            if is_here(address) and not ipaddress.ip_address(address).is_loopback:
                return address
    return _resolve(name)


def _resolve(name: str) -> str:
    return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


def shared_secret(where: Rendezvous, file: Path | None) -> Shared:
    """Return the secret that the machines share, or its file if the secret is read from one.

    On a loopback address, all launchers belong to one user, and the secret defaults to the user's own file.
    """
    given = env.text(env.SECRET)
    if file is None and given is not None:
        return Shared(given=secrets.parse(given, env.SECRET))
    if file is None and ipaddress.ip_address(where.address).is_loopback:
        return Shared(given=secrets.read_or_make(secrets.own_file()))
    if file is None:
        raise ConfigError(
            f"--rendezvous {where}: any process that reaches this port could join. Give all machines the same secret: "
            f"--secret-file FILE, where the first machine makes FILE and the others have a copy of it (readable "
            f"by you alone, as after chmod 600), or {env.SECRET} in the environment."
        )
    return Shared(file=file)


def is_here(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def listen_if_here(where: Rendezvous) -> socket.socket | None:
    """Open the coordinator's socket. Return None if the address is not this machine's or the port is in use.

    If two processes bind the port in the same microsecond, Linux may refuse both, so this tries up to 5 times.
    """
    if not is_here(where.address):
        return None
    for _ in range(_LISTEN_TRIES):
        with contextlib.suppress(StartError):
            return listen((where.address, where.port))
        time.sleep(SystemRandom().uniform(0.0, _POLL_SECONDS))  # forked processes share the state of ``random``
    return None


def interfaces() -> Iterator[tuple[str, ipaddress.IPv4Interface, int]]:
    """Yield the name, the IPv4 address with its network, and the flags of each interface that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                flags, address, mask = (
                    fcntl.ioctl(probe, request, struct.pack("256s", name.encode()[:15]))
                    for request in (_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK)
                )
            except OSError:  # no IPv4 address
                continue
            found = ipaddress.IPv4Interface(f"{socket.inet_ntoa(address[20:24])}/{socket.inet_ntoa(mask[20:24])}")
            yield name, found, struct.unpack_from("=H", flags, 16)[0]


def interface_of(address: str) -> str | None:
    return next((name for name, one, _ in interfaces() if str(one.ip) == address), None)


class AgentClient:
    """Connection of a remote agent to the coordinator."""

    def __init__(self, connection: Connection, run_info: Message, more: Sequence[bytes]) -> None:
        self._connection = connection
        self.first = int(run_info["first"])  # number of the agent's first worker
        self.name = str(run_info["name"])  # name of the run
        self.id = str(run_info["id"])  # unique identifier of the run
        self.resume: str | None = run_info["resume"]  # checkpoint to start from, if any
        self.address = str(connection.socket.getsockname()[0])  # address at which the coordinator reaches this machine
        self.coordinator = "{}:{}".format(*connection.socket.getpeername())  # ``host:port`` of the coordinator
        self.shown = -1  # number of the worker whose output is shown, on any machine; -1 if unknown
        # message with the ``code`` and ``reason`` of the run's end; None while it runs
        self.over: Message | None = None
        self.not_joined = False  # whether a worker of this machine has failed before it joined
        self._sending = threading.Lock()
        self._take(more)

    @property
    def broken(self) -> bool:
        return self._connection.broken

    def send(self, message: Message) -> None:
        """Send a message to the coordinator without blocking. :meth:`receive` sends the rest. Thread-safe."""
        with self._sending:
            self._connection.send(encode(message))

    def show(self, stream: str, line: str) -> None:
        """Send a line of rank 0's output to the coordinator's launcher, which shows it."""
        self.send({"type": "output", "stream": stream, "line": line[:LONGEST_TEXT]})

    def receive(self) -> None:
        """Send pending data, and handle all messages that have arrived."""
        with self._sending:
            self._connection.flush()
        try:
            while lines := self._connection.receive():
                self._take(lines)
        except ValueError:  # the authenticated coordinator sent an invalid message: treat the connection as broken
            self._connection.broken = True

    def _take(self, lines: Sequence[bytes]) -> None:
        for message in map(decode, lines):
            if message["type"] == "end":
                self.over = message
            elif message["type"] == "not-joined":
                self.not_joined = True
            elif message["type"] == "shown":
                self.shown = int(message["worker"])

    def await_end(self, or_refusal: bool) -> None:
        """Wait until the coordinator reports the end of the run.

        Also returns if the connection has ended, and with ``or_refusal`` if the coordinator reports that a worker of
        this machine failed before it joined.
        """
        while not self.broken and (self._connection.unsent or not (self.over or (or_refusal and self.not_joined))):
            self.receive()
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class Applicant:
    """Description of a launcher that joins a run."""

    workers: int  # number of workers that it starts
    script: str  # file name of the script
    name: str | None  # name of the run, if one was given
    about: Message  # properties of the machine that are compared with those of the coordinator's machine


def join(where: Rendezvous, applicant: Applicant, shared: Shared, seconds: float) -> tuple[AgentClient, Secret]:
    """Connect to the coordinator on another machine, and retry until it has started."""
    deadline = time.monotonic() + seconds
    reason = "no answer"
    while time.monotonic() < deadline:
        secret = shared.read()
        try:
            if secret is None:
                raise FileNotFoundError(f"there is no secret file {shared.file} here; copy it from there")
            connection = connect((where.address, where.port), AGENT, secret.key(AGENT), min(_ANSWER_SECONDS, seconds))
            try:
                return AgentClient(connection, *_register(connection, applicant, where)), secret
            except BaseException:
                connection.close()
                raise
        except Refused:
            raise StartError(
                f"The run at {where} does not accept the secret of this machine. Give both machines the same "
                f"--secret-file (or PACELINE_SECRET); if it is another run, choose another port."
            ) from None
        except (NotAuthenticated, ValueError, KeyError):
            raise StartError(
                f"What answers at {where} is not a Paceline run with this secret. Choose another port, or stop that "
                f"program."
            ) from None
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(min(_TRY_SECONDS, max(0.0, deadline - time.monotonic())))
            with contextlib.suppress(StartError):  # the first machine may have returned with another address
                where = parse_rendezvous(str(where))
    raise StartError(
        f"{socket.gethostname()} could not reach the run at {where} in {seconds:.0f} s: {reason}. Is paceline run "
        f"started on {where.name} with this --rendezvous, and does a firewall let port {where.port} through?"
    )


def _register(connection: Connection, applicant: Applicant, where: Rendezvous) -> tuple[Message, list[bytes]]:
    """Request to join the run, and return the coordinator's answer and any lines received after it."""
    about = {**applicant.about, "time": time.time()}
    connection.send(encode({"type": "agent", "host": socket.gethostname(), **vars(applicant), "about": about}))
    deadline = time.monotonic() + _ANSWER_SECONDS
    lines: list[bytes] = []
    while not lines:
        if connection.broken or time.monotonic() > deadline:
            raise ValueError("no answer")
        select.select([connection.socket], [], [], _TRY_SECONDS)
        lines = connection.receive()
    answer = decode(lines[0])
    if answer["type"] == "refused":
        raise StartError(
            f"Another run is at {where}: {answer['reason']}. Choose another port, or give the same script and --name."
        )
    return answer, lines[1:]
