"""Machines on one machine: network namespaces, each with one link to a common bridge."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

BURST_BYTES = 500_000
"""20 ms at 200 Mbit/s; with less than 10 ms a link looks slower than it is."""


def obstacle() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "ip and tc are not installed"
    name = f"pace{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace could be made: {made.stderr.strip()}"
    call("ip", "netns", "del", name)
    return ""


@contextlib.contextmanager
def network(count: int, rate: str | None, slow: str | None = None) -> Iterator[list[str]]:
    """Make namespaces with the addresses 10.77.0.1, 10.77.0.2, ... on ``eth0``; they are gone afterwards.

    Args:
        count: number of namespaces.
        rate: rate of each link in each direction, as tc writes it. None for no limit.
        slow: rate of the last link. None for the rate of the others.
    """
    hub = f"pace{os.getpid() % 10000}"
    names = [f"{hub}m{place}" for place in range(count)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left then, either
    with contextlib.ExitStack() as stack:
        call("ip", "netns", "add", hub)  # the bridge, too, is out of the machine's way
        stack.callback(call, "ip", "netns", "del", hub)
        within(hub, "ip", "link", "add", "bridge", "type", "bridge")
        within(hub, "ip", "link", "set", "bridge", "up")
        for place, name in enumerate(names):
            call("ip", "netns", "add", name)
            stack.callback(call, "ip", "netns", "del", name)
            within(hub, "ip", "link", "add", f"p{place}", "type", "veth", "peer", "name", "eth0", "netns", name)
            within(hub, "ip", "link", "set", f"p{place}", "master", "bridge", "up")
            within(name, "ip", "address", "add", f"10.77.0.{place + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                within(name, "ip", "link", "set", device, "up")
            own = slow if slow and place == count - 1 else rate
            for where, device in ((hub, f"p{place}"), (name, "eth0")) if own else ():
                shape = ("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", own)
                within(where, *shape, "burst", str(BURST_BYTES), "latency", "500ms")
        yield names


def call(*command: str) -> str:
    """Run a command; what it printed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def within(name: str, *command: str) -> str:
    """Run a command in a namespace; what it printed."""
    return call("ip", "netns", "exec", name, *command)
