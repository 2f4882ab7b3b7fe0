"""Host discovery: a script of the user prints a line ``host:slots`` for each host that is currently available."""

from __future__ import annotations

import contextlib
import functools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.config import quoted
from paceline.environments import env
from paceline.errors import ConfigError

_EVERY_SECONDS = 1.0
_LONGEST_SECONDS = 60.0

Slots = dict[str, int]  # number of workers of each host, in the order of the script


class Discovery:
    """Thread that runs the discovery script once a second until the run is over.

    Args:
        take: callback for each answer, called on the thread.

    Raises:
        ConfigError: the script cannot be run, or its output is invalid.
    """

    def __init__(
        self, script: Path, is_over: Callable[[], bool], take: Callable[[Slots], None] = lambda hosts: None
    ) -> None:
        self._script, self._is_over, self._take = script, is_over, take
        self.hosts = ask(script)  # last valid answer of the script
        threading.Thread(target=self._watch, name="paceline-discovery", daemon=True).start()

    def _watch(self) -> None:
        while not self._is_over():
            time.sleep(_EVERY_SECONDS)
            with contextlib.suppress(ConfigError):  # the script or its data may be changing
                self.hosts = ask(self._script)
            self._take(self.hosts)


class SlotsHere:
    """Slots of this machine, for a run that other machines cannot join. Warns once about each other host."""

    def __init__(self, script: Path, is_over: Callable[[], bool]) -> None:
        self._told: set[str] = set()
        self._discovery = Discovery(script, is_over, self._tell)

    @property
    def slots(self) -> int:
        """Number of slots of this machine in the last valid answer."""
        return slots_here(self._discovery.hosts)

    def _tell(self, hosts: Slots) -> None:
        for host in {one for one in hosts if not is_here(one)} - self._told:
            self._told.add(host)
            sys.stderr.write(
                f"{host} cannot join: this run began on loopback alone. With --on ssh, or a script that prints "
                f"{socket.gethostname()} in the place of localhost, other hosts can.\n"
            )


def ask(script: Path) -> Slots:
    """Run the script and parse its output. Raises ConfigError if the script cannot be run, or its output is invalid."""
    try:
        done = subprocess.run(
            [str(script.absolute())], capture_output=True, text=True, timeout=_LONGEST_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--host-discovery-script {script} cannot be run: {error}.") from None
    return parse_slots(done.stdout)


def parse_slots(text: str) -> Slots:
    """Parse lines ``host:slots``, or ``host`` for one slot. Slots of a repeated host are added.

    Example:
        >>> parse_slots("h1:2\\nh2\\nh1:1\\n")
        {'h1': 3, 'h2': 1}
    """
    found: Slots = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        host, slots = line.split(":") if line.count(":") == 1 else (line, "1")
        if not host or host.startswith("-") or " " in host or not (slots.isdecimal() and len(slots) < 6):
            raise ConfigError(f"The host discovery script prints {quoted(line)}: each line must be host:slots.")
        found[host] = found.get(host, 0) + int(slots)
    return found


def slots_here(hosts: Mapping[str, int]) -> int:
    """Return the total number of slots of this machine, over all its names.

    Example:
        >>> slots_here({"localhost": 2, "127.0.0.1": 1, "another": 4})
        3
    """
    return sum(slots for host, slots in hosts.items() if is_here(host))


def is_loopback_alone(hosts: Mapping[str, int]) -> bool:
    """Return whether all hosts are loopback names such as ``localhost``, so that no other machine can join."""
    return all(map(env.is_loopback, hosts))


def is_here(host: str) -> bool:
    """Return whether `host` is a name of this machine."""
    return env.is_loopback(host) or host in _own_names()


@functools.cache
def _own_names() -> frozenset[str]:
    return frozenset((socket.gethostname(), socket.getfqdn()))  # cached because getfqdn asks the name service
