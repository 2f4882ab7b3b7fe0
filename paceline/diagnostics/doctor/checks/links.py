"""Checks of measured links."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from paceline.diagnostics.doctor.finding import Finding, ok, size
from paceline.diagnostics.doctor.links import Link

_SLOW, _FAST_ENOUGH = 12.5e6, 250e6
_UNLIKE, _ASYMMETRIC = 4.0, 4.0
_HIGH_LATENCY = 5e-3
_LOSS = 0.004

Links = Mapping[tuple[str, str], Link]  # links by the names of the sending and the receiving machine


def check_links(links: Links) -> list[Finding]:
    """Return the findings for all links, in each direction."""
    usual = statistics.median([one.speed for one in links.values() if not one.problem] or [0.0])
    found = []
    for (here, other), link in links.items():
        place = f"{here} -> {other}"
        found.append(connection(link).at(place))
        if not link.problem:
            found += [loss(link).at(place), large_packets(link.speed > 0, link.mtu, place)]
        back = links.get((other, here))
        if here < other and back is not None and not link.problem and not back.problem:
            found.append(latency(min(link.latency, back.latency)).at(f"{here} - {other}"))
            if link.speed and back.speed:
                found.append(speed(link.speed, back.speed, (here, other), usual))
    return found


def suspicious(links: Links) -> list[tuple[str, str]]:
    """Return the links to measure again, because a busy machine can make any link appear slow."""
    return [
        ends
        for ends, link in links.items()
        if not link.problem and (link.speed < _FAST_ENOUGH or link.latency > _HIGH_LATENCY or link.loss > _LOSS)
    ]


def better(first: Link, second: Link) -> Link:
    """Return the best values of two measurements of a link."""
    if first.problem or second.problem:
        return first if second.problem else second
    return replace(
        second,
        latency=min(first.latency, second.latency),
        loss=min(first.loss, second.loss),
        speed=max(first.speed, second.speed),
    )


def connection(link: Link) -> Finding:
    check = "ports"
    if not link.problem:
        return ok(check, "open")
    what = "a firewall closes the ports of the workers" if link.firewall else "no connection"
    return Finding(
        check,
        "failure",
        f"{what}: {link.problem}",
        "Any two workers connect to each other on ports that the system chooses; gloo and NCCL then fail with "
        "'Connection refused', 'Connection timed out' or 'unhandled system error'.",
        "let all TCP ports through between these machines, in both directions (nft list ruleset, iptables -L, the "
        "security group of the cloud)",
    )


def latency(seconds: float) -> Finding:
    check = "latency"
    values = f"{1000 * seconds:.3g} ms for a round trip"
    if seconds <= _HIGH_LATENCY:
        return ok(check, values)
    return Finding(
        check,
        "warning",
        f"high latency: {values}",
        "An all-reduce makes many round trips a step; within a building one takes less than a millisecond.",
        "use machines of one site and one zone, without a VPN or a proxy between them; or synchronize less often "
        "(strategy=local)",
    )


def loss(link: Link) -> Finding:
    check = "packet loss"
    values = f"{100 * link.loss:.2g} % of the packets sent again"
    if link.loss <= _LOSS:
        return ok(check, values)
    return Finding(
        check,
        "warning",
        f"packets are lost: {values}",
        "TCP waits and slows down after each loss: a step then takes several times as long.",
        "look for a bad cable, a wrong duplex setting, an overloaded switch (ip -s link, ethtool -S)",
    )


def large_packets(passed: bool, mtu: int, place: str) -> Finding:
    """Check that large packets pass. A path whose MTU is below that of its ends drops only full packets."""
    check = "large packets"
    if passed:
        return ok(check, f"pass; MTU {mtu}").at(place)
    return Finding(
        check,
        "failure",
        f"small messages pass and large ones do not: the MTU on the way is below {mtu}, which both machines assume",
        "Connections open, and workers hang at the first gradient until the timeout.",
        "set the MTU of the interfaces to that of the network between (often 1500, in a VPN or overlay 1400 to 1450), "
        "and let ICMP 'fragmentation needed' through the firewall",
        place,
    )


def speed(there: float, back: float, ends: tuple[str, str], usual: float) -> Finding:
    check, (here, other), place = "link speed", ends, " - ".join(ends)
    each = f"{_rate(there)} from {here} to {other}, {_rate(back)} from {other} to {here}"
    slower, faster = sorted((there, back))
    why = f"{size(4e8)} of gradients (100 million parameters) take {4e8 / max(slower, 1.0):.1f} s there each step."
    cure = "look at the negotiated speed (ethtool), the cable, traffic shaping (tc qdisc), the type of cloud machine"
    if slower < _FAST_ENOUGH and faster > _ASYMMETRIC * slower:
        return Finding(check, "warning", f"asymmetric link: {each}", why, cure, place)
    if slower < _SLOW:
        return Finding(check, "warning", f"slow link: {each}", why, cure, place)
    if slower < _FAST_ENOUGH and slower * _UNLIKE < usual:
        return Finding(check, "warning", f"slower than the other links ({_rate(usual)}): {each}", why, cure, place)
    return ok(check, each).at(place)


def _rate(speed: float) -> str:
    return f"{8e-6 * speed:.4g} Mbit/s"
