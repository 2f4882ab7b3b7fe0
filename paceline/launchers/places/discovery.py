"""How many workers this machine may have now, as a script of the user says: one line ``host:slots`` for each host."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paceline.config import quoted
from paceline.errors import ConfigError

_EVERY_SECONDS = 1.0
_LONGEST_SECONDS = 60.0
_HERE = frozenset({"localhost", "127.0.0.1", "::1"})


class Discovery:
    """Asks the script again and again, on a thread, until the run is over.

    Args:
        script: an executable file.
        is_over: whether to ask no more.

    Attributes:
        slots: of this machine, as the script has said last.

    Raises:
        ConfigError: the script cannot be run, or prints something else.
    """

    def __init__(self, script: Path, is_over: Callable[[], bool]) -> None:
        self._script, self._is_over = script, is_over
        self.slots = self._ask()
        threading.Thread(target=self._watch, name="paceline-discovery", daemon=True).start()

    def _watch(self) -> None:
        while not self._is_over():
            time.sleep(_EVERY_SECONDS)
            with contextlib.suppress(ConfigError):  # it may be in the middle of a change
                self.slots = self._ask()

    def _ask(self) -> int:
        try:
            done = subprocess.run(
                [str(self._script.absolute())], capture_output=True, text=True, timeout=_LONGEST_SECONDS, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"--host-discovery-script {self._script} cannot be run: {error}.") from None
        return slots_here(done.stdout, default=1)


def slots_here(text: str, default: int) -> int:
    """Add up the slots of this machine.

    Args:
        text: a line ``host:slots``, or ``host``, for each host.
        default: the slots of a host without a number.

    Raises:
        ConfigError: a line is none of these, or names another machine.

    Example:
        >>> slots_here("localhost:2\\n127.0.0.1\\n", default=1)
        3
    """
    total = 0
    for line in filter(None, map(str.strip, text.splitlines())):
        host, colon, slots = line.partition(":")
        if not host or (colon and not (slots.isdecimal() and len(slots) < 6)):
            raise ConfigError(f"The host discovery script prints {quoted(line)}: each line must be host:slots.")
        if host not in _HERE | {socket.gethostname(), socket.getfqdn()}:
            raise ConfigError(
                f"The host discovery script prints {quoted(line)}, which is not this machine: run `paceline run "
                f"--nodes MIN:MAX --rendezvous HOST:PORT` on each machine instead; they join and leave a running job."
            )
        total += int(slots) if colon else default
    return total
