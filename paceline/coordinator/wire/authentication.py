"""Mutual authentication of the two ends of a connection, before either trusts the other.

Challenge and response, in lines of text::

    coordinator  paceline 1 <nonce>
    client       worker 3 <nonce> <proof>
    coordinator  welcome <proof>             or: refused

A proof is the HMAC-SHA256, with the role's key, of the protocol, the proving end, the role and both nonces. It is valid
for this connection, direction and role only, so it cannot be replayed or reflected. A worker's key is bound to its
number and the run (:mod:`paceline.system.secret`). A peer without a key learns only that Paceline is listening.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import time
from collections.abc import Callable

LONGEST_LINE = 256  # largest length of a line before authentication, in bytes
AGENT = "agent"
_PROTOCOL = "paceline 1"
_CHALLENGE = re.compile(rb"paceline 1 ([0-9a-f]{64})")
_ANSWER = re.compile(rb"(agent|worker (?:0|[1-9][0-9]{0,8})) ([0-9a-f]{64}) ([0-9a-f]{64})")
_WELCOME = re.compile(rb"welcome ([0-9a-f]{64})")
_REFUSED = b"refused"

Keys = Callable[[str], bytes]  # function from a role to its key


class NotAuthenticated(ConnectionError):
    """The other end could not prove that it belongs to this run, or did not accept this end's proof."""


class Refused(NotAuthenticated):
    """The coordinator did not accept this end's proof, because the two ends belong to different runs."""


def worker(number: int) -> str:
    return f"worker {number}"


class Challenge:
    """Coordinator's side of the authentication of one connection."""

    refusal = _REFUSED + b"\n"  # line to send to a refused client

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(32)

    @property
    def line(self) -> bytes:
        """First line to send: the protocol and the coordinator's nonce."""
        return f"{_PROTOCOL} {self._nonce}\n".encode()

    def check(self, answer: bytes, keys: Keys) -> tuple[str, bytes]:
        """Check a client's answer, and return its role and the welcome line to send."""
        found = _ANSWER.fullmatch(answer)
        if found is None:
            raise NotAuthenticated("no answer to the challenge")
        role, nonce, proof = (part.decode() for part in found.groups())
        key = keys(role)
        if not hmac.compare_digest(proof, _proof(key, "client", role, self._nonce, nonce)):
            raise NotAuthenticated(f"does not have the key of {role.split()[0]} of this run")
        return role, f"welcome {_proof(key, 'coordinator', role, self._nonce, nonce)}\n".encode()


def authenticate(connection: socket.socket, role: str, key: bytes, seconds: float) -> None:
    """Authenticate to a coordinator, and verify that it belongs to this run.

    Args:
        connection: new connection, on which nothing has been read or written.
        role: ``AGENT``, or the result of :func:`worker`.

    Raises:
        Refused: the coordinator does not accept the key.
        OSError: the connection has ended.
    """
    try:
        _authenticate(connection, role, key, time.monotonic() + seconds)
    except TimeoutError:
        raise NotAuthenticated(f"it does not answer within {seconds:.0f} s") from None


def admit(connection: socket.socket, keys: Keys, seconds: float) -> str:
    """Authenticate a client that has just connected, within a timeout in seconds, and return its role.

    Raises:
        NotAuthenticated: the client does not have the key of the role it claims.
        OSError: the connection has ended, or the client has not answered in time.
    """
    challenge = Challenge()
    connection.settimeout(seconds)
    connection.sendall(challenge.line)
    try:
        role, welcome = challenge.check(_read_line(connection, time.monotonic() + seconds), keys)
    except NotAuthenticated:
        connection.sendall(challenge.refusal)
        raise
    connection.sendall(welcome)
    return role


def _authenticate(connection: socket.socket, role: str, key: bytes, deadline: float) -> None:
    challenge = _CHALLENGE.fullmatch(_read_line(connection, deadline))
    if challenge is None:
        raise NotAuthenticated("it speaks another protocol")
    theirs, own = challenge[1].decode(), secrets.token_hex(32)
    connection.sendall(f"{role} {own} {_proof(key, 'client', role, theirs, own)}\n".encode())
    answer = _read_line(connection, deadline)
    if answer == _REFUSED:
        raise Refused("it does not accept this key")
    welcome = _WELCOME.fullmatch(answer)
    if welcome is None or not hmac.compare_digest(welcome[1].decode(), _proof(key, "coordinator", role, theirs, own)):
        raise NotAuthenticated("it could not prove that it belongs to this run")


def _proof(key: bytes, prover: str, role: str, coordinators: str, clients: str) -> str:
    text = "\n".join((_PROTOCOL, prover, role, coordinators, clients))
    return hmac.digest(key, text.encode(), "sha256").hex()


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(LONGEST_LINE - len(line))
        if not data:
            if len(line) == LONGEST_LINE:
                raise NotAuthenticated("it speaks another protocol")
            raise ConnectionResetError("it has closed the connection")
        line += data
    if b"\n" in line[:-1]:
        raise NotAuthenticated("it speaks another protocol")
    return line[:-1]
