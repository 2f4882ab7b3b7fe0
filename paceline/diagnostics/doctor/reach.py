"""Attempts to reach a port of another machine, which also show whether the machine or a firewall refused."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["connected", "refused", "rejected", "no answer", "no machine", "no route", "failed"]

_CONNECT_SECONDS = 4.0  # long enough for two retransmissions of a lost SYN
_NEIGHBOURS = Path("/proc/net/arp")
_IP_RECVERR = 11
_FROM_ICMP = 2
_UNREACHABLE = 3
_PROHIBITED = {9, 10, 13}  # ICMP codes by which a firewall prohibits a connection
_CAUSES = {
    "refused": "connection refused: the machine answers, but no program listens on this port",
    "rejected": "connection rejected by a firewall (it answers with ICMP)",
    "no answer": "no answer: a firewall drops the packets, or the address is wrong",
    "no machine": "no machine answers at this address: it is off, its cable is unplugged, or the address is wrong",
    "no route": "this machine has no route to that network",
}


@dataclass(frozen=True)
class Attempt:
    """Result of an attempt to connect, with the socket if it was opened."""

    kind: Kind
    detail: str = ""
    socket: socket.socket | None = None

    @property
    def cause(self) -> str:
        """Reason why the attempt failed."""
        return _CAUSES.get(self.kind, self.detail)


def attempt(address: str, port: int) -> Attempt:
    """Try to open a connection. The caller closes its socket."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect((address, port))
    except OSError as error:
        kind = _kind(error, connection, address)
        connection.close()
        return Attempt(kind, error.strerror or str(error))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Attempt("connected", socket=connection)


def _kind(error: OSError, connection: socket.socket, address: str) -> Kind:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no machine" if _nobody_has(address) else "no answer"
    if _rejected(connection) or error.errno == errno.EACCES:
        return "rejected"
    if error.errno == errno.ECONNREFUSED:
        return "refused"
    if error.errno == errno.EHOSTUNREACH:
        return "no machine"
    return "no route" if error.errno in (errno.ENETUNREACH, errno.EPERM) else "failed"


def _rejected(connection: socket.socket) -> bool:
    """Return whether a firewall has answered. A closed port answers with a TCP reset, and REJECT with ICMP."""
    connection.setblocking(False)  # the error queue is empty if no firewall answered
    try:
        _, ancillary, _, _ = connection.recvmsg(512, 512, socket.MSG_ERRQUEUE)
    except OSError:
        return False
    for level, kind, data in ancillary:
        if level == socket.IPPROTO_IP and kind == _IP_RECVERR and len(data) >= 7:
            origin, icmp, code = data[4], data[5], data[6]
            if origin == _FROM_ICMP and icmp == _UNREACHABLE and (code == 3 or code in _PROHIBITED):
                return True
    return False


def _nobody_has(address: str) -> bool:
    """Return whether no machine on the local network answered the ARP request for an address."""
    try:
        rows = [line.split() for line in _NEIGHBOURS.read_text().splitlines()[1:]]
    except OSError:
        return False
    return any(row[0] == address and row[2] == "0x0" for row in rows)
