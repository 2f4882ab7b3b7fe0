"""By which of their networks machines reach each other."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_UP, _LOOPBACK = 0x1, 0x8


def networks() -> list[str]:
    """The addresses of this machine with the length of their network's prefix, but those of loopback: 10.0.0.1/24."""
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
            except OSError:  # it has none
                continue
            if flags & _UP and not flags & _LOOPBACK:
                found.append(ipaddress.ip_interface(f"{address}/{mask}").with_prefixlen)
    return found


def shared_address(ranks: Sequence[Sequence[str]]) -> str | None:
    """The address of rank 0 by which the others reach it; None if there is none.

    It is in a network of which all have an address. Machines with the same address, as of a bridge that each has for
    its containers, do not meet there. Without such a network routers may know the way, so it is the first of its own.

    Args:
        ranks: the networks of the machine of each rank.
    """
    first = list(map(ipaddress.ip_interface, ranks[0]))
    others = [{*map(ipaddress.ip_interface, one)} for one in ranks if list(one) != list(ranks[0])]
    own = [one for one in first if all(one.ip not in {other.ip for other in machine} for machine in others)]
    near = [one for one in own if all(any(other.ip in one.network for other in machine) for machine in others)]
    return str((near or own)[0].ip) if own else None


def interface_towards(host: str) -> str | None:
    """The network interface by which this machine sends to a host; None if that is unknown."""
    from paceline.coordinator.machines import interface_of

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return interface_of(str(probe.getsockname()[0]))
    except OSError:
        return None
