"""How many workers each machine may have now, as a script of the user says: one line ``host:slots`` for each host."""

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

Slots = dict[str, int]
"""The workers of each host, in the order of the script."""


class Discovery:
    """Asks the script again and again, on a thread, until the run is over.

    Args:
        script: an executable file.
        is_over: whether to ask no more.
        take: called with each answer, on the thread.

    Attributes:
        hosts: what the script has said last.

    Raises:
        ConfigError: the script cannot be run, or prints something else.
    """

    def __init__(
        self, script: Path, is_over: Callable[[], bool], take: Callable[[Slots], None] = lambda hosts: None
    ) -> None:
        self._script, self._is_over, self._take = script, is_over, take
        self.hosts = ask(script)
        threading.Thread(target=self._watch, name="paceline-discovery", daemon=True).start()

    def _watch(self) -> None:
        while not self._is_over():
            time.sleep(_EVERY_SECONDS)
            with contextlib.suppress(ConfigError):  # it may be in the middle of a change
                self.hosts = ask(self._script)
            self._take(self.hosts)


class SlotsHere:
    """The slots of this machine, in a run that other machines cannot join; those of others are named once.

    Args:
        script: see :class:`Discovery`.
        is_over: see there.
    """

    def __init__(self, script: Path, is_over: Callable[[], bool]) -> None:
        self._told: set[str] = set()
        self._discovery = Discovery(script, is_over, self._tell)

    @property
    def slots(self) -> int:
        """Of this machine, as the script has said last."""
        return slots_here(self._discovery.hosts)

    def _tell(self, hosts: Slots) -> None:
        for host in {one for one in hosts if not is_here(one)} - self._told:
            self._told.add(host)
            sys.stderr.write(
                f"{host} cannot join: this run began on loopback alone. With --on ssh, or a script that prints "
                f"{socket.gethostname()} in the place of localhost, other hosts can.\n"
            )


def ask(script: Path) -> Slots:
    """Run the script, and read what it prints.

    Raises:
        ConfigError: it cannot be run, or prints something else.
    """
    try:
        done = subprocess.run(
            [str(script.absolute())], capture_output=True, text=True, timeout=_LONGEST_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--host-discovery-script {script} cannot be run: {error}.") from None
    return parse_slots(done.stdout)


def parse_slots(text: str) -> Slots:
    """Read a line ``host:slots``, or ``host`` with one slot, for each host.

    Raises:
        ConfigError: a line is none of these.

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
    """Add up the slots of this machine.

    Example:
        >>> slots_here({"localhost": 2, "127.0.0.1": 1, "another": 4})
        3
    """
    return sum(slots for host, slots in hosts.items() if is_here(host))


def is_loopback_alone(hosts: Mapping[str, int]) -> bool:
    """Whether the script names nothing but ``localhost``, where no other machine can join."""
    return all(map(env.is_loopback, hosts))


def is_here(host: str) -> bool:
    """Whether this is a name of this machine."""
    return env.is_loopback(host) or host in _own_names()


@functools.cache
def _own_names() -> frozenset[str]:
    return frozenset((socket.gethostname(), socket.getfqdn()))  # the latter asks the name service
