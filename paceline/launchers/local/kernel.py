"""Process information from the kernel: out-of-memory kills, process states and start times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_OWN_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_MACHINE = Path("/proc/vmstat")
STOPPED = "is stopped"
_FLAGS, _STARTED = 6, 19
"""Indices in /proc/<pid>/stat, counted from the first field after the name: flags and start time."""
_EXITING = 0x4
_STATES = {"R": "computes", "S": "sleeps", "D": "waits for a disk or the network", "T": STOPPED, "t": STOPPED}


class OutOfMemory:
    """Detector of processes that the kernel has killed for lack of memory. Without counters it detects no kills.

    Args:
        counters: files with a line ``oom_kill <count>``. Defaults to the file of this process's control group, or else
            of the whole machine.
    """

    def __init__(self, counters: Sequence[Path] | None = None) -> None:
        self._counters = own_counters() if counters is None else list(counters)
        self._seen = self._count()

    def again(self) -> bool:
        """Return whether the kernel has killed a process. Each kill is reported once."""
        more = self._count() > self._seen
        self._seen += more
        return more

    def _count(self) -> int:
        return sum(_read(path) for path in self._counters)


def control_chain(controller: str) -> list[Path]:
    """Return the folders of this process's control groups, from its own group to the outermost visible group.

    Supports both versions of control groups, which have a tree for all controllers or for each controller. Inside a
    container the path from the kernel may not exist. The mounted group is then the container's own group.
    """
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, names, path = line.split(":", 2)
        root = _ROOT / controller if controller in names.split(",") else _ROOT if not names else None
        if root is None or not root.is_dir():
            continue
        own = root / path.lstrip("/")
        chain = [own, *own.parents] if own.is_dir() and ".." not in own.parts else [root]
        found += [folder for folder in chain if folder == root or root in folder.parents]
    return found


def own_counters() -> list[Path]:
    """Return the counter file of the innermost control group that has one (version 2 or 1), or that of the machine."""
    places = [folder / name for folder in control_chain("memory") for name in ("memory.events", "memory.oom_control")]
    return [path for path in places if path.is_file()][:1] or [_MACHINE]


def _read(path: Path) -> int:
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def state_of(pid: int) -> str:
    """Return the state of a local process, such as ``sleeps`` or ``is stopped``. Empty if unknown."""
    try:
        return _STATES.get(_fields(pid)[0].decode(), "")
    except OSError:
        return ""


def is_ending(pid: int, started: int | None = None) -> bool:
    """Return whether a local process has ended or is exiting. Freeing its memory can take a fifth of a second.

    Always returns False on systems other than Linux.

    Args:
        started: start time (see :func:`start_of`). Distinguishes the process from a later process with the same id.
    """
    try:
        fields = _fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return Path("/proc/self/stat").exists()  # else this system has no such files
    except OSError:
        return False
    return bool(int(fields[_FLAGS]) & _EXITING) or started not in (None, int(fields[_STARTED]))


def start_of(pid: int) -> int | None:
    """Return the start time of a process in ticks since boot, or None. With the process id it identifies a process."""
    try:
        return int(_fields(pid)[_STARTED])
    except OSError:
        return None


def _fields(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()
