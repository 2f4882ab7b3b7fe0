"""Networks by which machines reach each other."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from paceline.coordinator.machines import interface_of, interfaces

_UP, _LOOPBACK = 0x1, 0x8


def networks() -> list[str]:
    """Return this machine's IPv4 addresses with the prefix length, such as 10.0.0.1/24, without loopback."""
    return [one.with_prefixlen for _, one, flags in interfaces() if flags & _UP and not flags & _LOOPBACK]


def shared_address(ranks: Sequence[Sequence[str]]) -> str | None:
    """Return an address at which all ranks can reach rank 0, or None if rank 0 has no candidate.

    Prefers an address in a network in which every machine has an address. Excludes addresses that another machine has
    too, such as that of a container bridge. Without a common network, returns the first candidate, which may be
    reachable through routers.

    Args:
        ranks: addresses of each rank's machine, from :func:`networks`.
    """
    first = list(map(ipaddress.ip_interface, ranks[0]))
    others = [{*map(ipaddress.ip_interface, one)} for one in ranks if list(one) != list(ranks[0])]
    own = [one for one in first if all(one.ip not in {other.ip for other in machine} for machine in others)]
    near = [one for one in own if all(any(other.ip in one.network for other in machine) for machine in others)]
    return str((near or own)[0].ip) if own else None


def address_towards(host: str) -> str:
    """Return the address from which this machine sends to a host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # UDP: sends nothing
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """Return the network interface by which this machine sends to a host, or None if it is unknown."""
    try:
        return interface_of(address_towards(host))
    except OSError:
        return None
