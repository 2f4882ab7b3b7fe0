"""Networks by which machines reach each other."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_UP, _LOOPBACK = 0x1, 0x8


def networks() -> list[str]:
    """Return this machine's IPv4 addresses with the prefix length, such as 10.0.0.1/24, without loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                (flags,) = struct.unpack_from("=H", fcntl.ioctl(probe, _SIOCGIFFLAGS, asked), 16)
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(probe, request, asked)[20:24])
                    for request in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                )
            except OSError:  # no IPv4 address
                continue
            if flags & _UP and not flags & _LOOPBACK:
                found.append(ipaddress.ip_interface(f"{address}/{mask}").with_prefixlen)
    return found


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


def interface_towards(host: str) -> str | None:
    """Return the network interface by which this machine sends to a host, or None if it is unknown."""
    from paceline.coordinator.machines import interface_of

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # UDP: sends nothing
            return interface_of(str(probe.getsockname()[0]))
    except OSError:
        return None
