"""What the kernel knows of processes: how many it has ended for lack of memory, and what one of them is doing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_OWN_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_MACHINE = Path("/proc/vmstat")
STOPPED = "is stopped"
_FLAGS, _STARTED = 6, 19
"""Fields of /proc/<pid>/stat, counted from behind the name: the flags, and when the process started."""
_EXITING = 0x4
_STATES = {"R": "computes", "S": "sleeps", "D": "waits for a disk or the network", "T": STOPPED, "t": STOPPED}


class OutOfMemory:
    """Notices that the kernel has ended a process for lack of memory.

    The counters are those of the own control group, or else of the whole machine; where there is none, nothing is
    noticed.

    Args:
        counters: files with a line ``oom_kill <count>``.
    """

    def __init__(self, counters: Sequence[Path] | None = None) -> None:
        self._counters = own_counters() if counters is None else list(counters)
        self._seen = self._count()

    def again(self) -> bool:
        """Whether it has happened; each time counts once."""
        more = self._count() > self._seen
        self._seen += more
        return more

    def _count(self) -> int:
        return sum(_read(path) for path in self._counters)


def own_counters() -> list[Path]:
    """The file that counts for this control group (version 2, or 1), or else for the machine."""
    try:
        groups = [line.split(":", 2) for line in _OWN_GROUPS.read_text().splitlines()]
    except OSError:
        groups = []
    places = []
    for _, controllers, name in groups:
        if not controllers:
            places += [_ROOT / name.lstrip("/") / "memory.events", _ROOT / "memory.events"]
        elif "memory" in controllers.split(","):
            places += [_ROOT / "memory" / part / "memory.oom_control" for part in (name.lstrip("/"), ".")]
    return [path for path in places if path.is_file()][:1] or [_MACHINE]


def _read(path: Path) -> int:
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def state_of(pid: int) -> str:
    """What a process of this machine does: ``sleeps``, ``is stopped``; empty if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return _STATES.get(text.rpartition(") ")[2][:1], "")


def is_ending(pid: int, started: int | None = None) -> bool:
    """Whether a process of this machine has ended or is exiting; freeing its memory can take a fifth of a second.

    Known on Linux only; elsewhere false.

    Args:
        pid: of the process.
        started: see :func:`start_of`; then another process with the same number does not count.
    """
    try:
        fields = _fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return _has_proc()
    except OSError:
        return False
    return bool(int(fields[_FLAGS]) & _EXITING) or started not in (None, int(fields[_STARTED]))


def start_of(pid: int) -> int | None:
    """When a process started, in ticks since the machine did: with its number that tells it from all others."""
    try:
        return int(_fields(pid)[_STARTED])
    except OSError:
        return None


def _fields(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _has_proc() -> bool:
    try:
        with open("/proc/self/stat", "rb"):
            return True
    except OSError:
        return False
