"""Several machines: where they meet, which one holds the coordinator, and how the others join.

Each machine runs the same command. The one that has the address of ``--rendezvous`` holds the coordinator; the agents
of the others connect to it, now or later, and start their workers. When the coordinator's machine is gone, nobody knows
any more who trains: the other agents end their workers and wait until it is back.
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
from collections.abc import Sequence
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
_LOOK_SECONDS = 0.05
_LISTEN_TRIES = 5
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Rendezvous:
    """Where the machines of a run meet; ``address`` is that of the name."""

    name: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"


def parse_rendezvous(text: str, patience_seconds: float = 0.0) -> Rendezvous:
    """Resolve ``host:port``.

    Args:
        text: as given.
        patience_seconds: to wait for the name to have an address.

    Raises:
        ConfigError: it is no such pair.
        StartError: the name has no address.
    """
    name, _, port = text.rpartition(":")
    if not name or not port.isdecimal() or len(port) > 5 or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--rendezvous {text}: give the name and a port of the first machine, as in node1:29500.")
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return Rendezvous(name, _address_of(name), int(port))
        except (socket.gaierror, UnicodeError) as error:  # the latter: a name that cannot be one
            why = getattr(error, "strerror", None) or error
        if time.monotonic() >= deadline:
            raise StartError(
                f"--rendezvous {text}: the name {name!r} has no address ({why}). Check the spelling, or give "
                f"the address itself; `getent hosts {name}` shows what this machine knows."
            )
        time.sleep(_TRY_SECONDS)


def _address_of(name: str) -> str:
    """The address of a machine; its own one it knows before the name service does, and after a change."""
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
    """Find what the machines that meet there share: the secret in a file, or that of the environment.

    On a loopback address all launchers are those of one user, who has a file for it.

    Raises:
        ConfigError: there is neither.
    """
    given = env.secret()
    if file is None and given is not None:
        return Shared(given=secrets.parse(given, env.SECRET))
    if file is None and ipaddress.ip_address(where.address).is_loopback:
        return Shared(given=secrets.read_or_make(secrets.own_file()))
    if file is None:
        raise ConfigError(
            f"--rendezvous {where}: whoever reaches this port could join the run. Give all machines the same secret: "
            f"--secret-file FILE, where the first machine makes FILE and the others have a copy of it (readable by "
            f"you alone, as after chmod 600), or {env.SECRET} in the environment."
        )
    return Shared(file=file)


def is_here(address: str) -> bool:
    """Whether this machine has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def listen_if_here(where: Rendezvous) -> socket.socket | None:
    """Open the coordinator's socket if this is its machine and no other process has it; else None.

    Of two processes that ask for a port in the same microsecond Linux may refuse both; so who is refused asks again.
    """
    if not is_here(where.address):
        return None
    for _ in range(_LISTEN_TRIES):
        with contextlib.suppress(StartError):
            return listen((where.address, where.port))
        time.sleep(SystemRandom().uniform(0.0, _LOOK_SECONDS))  # forked processes share the state of the other one
    return None


def interface_of(address: str) -> str | None:
    """Find the network interface that has an address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


class AgentClient:
    """The connection of another machine's agent to the coordinator.

    Attributes:
        first: the number of its first worker.
        name: of the run.
        id: tells the run from all others.
        resume: the checkpoint to start from.
        address: of this machine, as the coordinator reaches it.
        coordinator: its ``host:port``.
        shown: the worker whose output is shown, on whatever machine.
        over: how the run ended, if it has: ``code`` and ``reason``.
        not_joined: whether a worker of this machine has failed before it took part.
    """

    def __init__(self, connection: Connection, run_info: Message, more: Sequence[bytes]) -> None:
        self._connection = connection
        self.first = int(run_info["first"])
        self.name = str(run_info["name"])
        self.id = str(run_info["id"])
        self.resume: str | None = run_info["resume"]
        self.address = str(connection.socket.getsockname()[0])
        self.coordinator = "{}:{}".format(*connection.socket.getpeername())
        self.shown = -1
        self.over: Message | None = None
        self.not_joined = False
        self._sending = threading.Lock()
        self._take(more)

    @property
    def broken(self) -> bool:
        """Whether the connection has ended."""
        return self._connection.broken

    def send(self, message: Message) -> None:
        """Send a message to the coordinator, now or when :meth:`receive` is called next; any thread may."""
        with self._sending:
            self._connection.send(encode(message))

    def show(self, stream: str, line: str) -> None:
        """Let the coordinator's launcher show a line of rank 0."""
        self.send({"type": "output", "stream": stream, "line": line[:LONGEST_TEXT]})

    def receive(self) -> None:
        """Take the messages that have come since."""
        with self._sending:
            self._connection.flush()
        try:
            while lines := self._connection.receive():
                self._take(lines)
        except ValueError:  # it has proven that it is the coordinator; so it is a broken one
            self._connection.broken = True

    def _take(self, lines: Sequence[bytes]) -> None:
        for message in map(decode, lines):
            if message["type"] == "end":
                self.over = message
            elif message["type"] == "not-joined":
                self.not_joined = True
            elif message["type"] == "shown":
                self.shown = int(message["worker"])

    def await_end(self) -> None:
        """Wait until the coordinator has said how the run ended, or is gone."""
        while (self.over is None or self._connection.unsent) and not self.broken:
            self.receive()
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


@dataclass(frozen=True)
class Applicant:
    """What a launcher that joins says of itself.

    Attributes:
        workers: how many it starts.
        script: the name of the script's file.
        name: of the run, if it was given.
        about: what is compared with the coordinator's machine.
    """

    workers: int
    script: str
    name: str | None
    about: Message


def join(where: Rendezvous, applicant: Applicant, shared: Shared, seconds: float) -> tuple[AgentClient, Secret]:
    """Connect to the coordinator of another machine, which may yet have to start.

    Args:
        where: the coordinator is.
        applicant: this launcher.
        shared: where the secret is found, as soon as its file is there.
        seconds: to try.

    Returns:
        the connection, and the secret.

    Raises:
        StartError: nobody answers there in time, or it is another run.
    """
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
            with contextlib.suppress(StartError):  # the first machine may have come back with another address
                where = parse_rendezvous(str(where))
    raise StartError(
        f"{socket.gethostname()} could not reach the run at {where} in {seconds:.0f} s: {reason}. Is paceline run "
        f"started on {where.name} with this --rendezvous, and does a firewall let port {where.port} through?"
    )


def _register(connection: Connection, applicant: Applicant, where: Rendezvous) -> tuple[Message, list[bytes]]:
    """Ask to join; gives what the coordinator says of the run, and what has come with it."""
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
