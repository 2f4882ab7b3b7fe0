"""Limits of this process on cores, memory and files, including those of a container or a job."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.launchers import machine
from paceline.launchers.local.kernel import control_chain
from paceline.launchers.machine import number_in

_PROC = Path("/proc")
_SHARED = Path("/dev/shm")
_RDMA = Path("/sys/class/infiniband")
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Limits:
    """Resources of this machine, and limits of this process. None if there is no limit, or it is unknown."""

    cores: int = 1  # number of cores that this process may use
    all_cores: int = 1  # number of cores of the machine
    domains: int = 1  # number of NUMA domains of the usable cores
    near_memory: bool = True  # whether this process may use memory of those domains
    quota: float | None = None  # CPU quota of the control group, in cores
    memory: int = 0  # total memory of the machine in bytes
    available: int = 0  # bytes of memory that the kernel reports as available
    memory_limit: int | None = None  # memory limit of the control group in bytes
    memory_used: int = 0  # bytes of memory that the control group uses, without inactive page cache
    shared_size: int | None = None  # size of ``/dev/shm`` in bytes
    shared_free: int = 0  # free bytes of ``/dev/shm``
    shared_writable: bool = True
    files: int | None = None  # limit on open files of a process
    processes: int | None = None  # limit on processes of this user, including threads
    locked: int | None = None  # limit on locked memory in bytes
    rdma: tuple[str, ...] = ()  # names of RDMA network cards, which need locked memory


def measure() -> Limits:
    here = machine.measure()
    memory = dict(_memory())
    limit, used = _memory_limit()
    shared = _room(_SHARED)
    return Limits(
        cores=len(here.cores),
        all_cores=os.cpu_count() or 1,
        domains=max(1, len(here.domains)),
        near_memory=_near_memory(),
        quota=_quota(),
        memory=memory.get("MemTotal", 0),
        available=memory.get("MemAvailable", 0),
        memory_limit=limit,
        memory_used=used,
        shared_size=shared[0] if shared else None,
        shared_free=shared[1] if shared else 0,
        shared_writable=os.access(_SHARED, os.W_OK),
        files=machine.allowed().files,
        processes=machine.allowed().processes,
        locked=_soft(resource.RLIMIT_MEMLOCK),
        rdma=tuple(sorted(path.name for path in _RDMA.glob("*"))),
    )


def _soft(what: int) -> int | None:
    soft = resource.getrlimit(what)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _room(folder: Path) -> tuple[int, int] | None:
    try:
        about = os.statvfs(folder)
    except OSError:
        return None
    return about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize


def _memory() -> Iterator[tuple[str, int]]:
    with contextlib.suppress(OSError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            yield name, int(rest.split()[0]) * 1024


def _quota() -> float | None:
    found = []
    for folder in control_chain("cpu"):
        for quota, period in (
            (number_in(folder / "cpu.max"), number_in(folder / "cpu.max", 1)),
            (number_in(folder / "cpu.cfs_quota_us"), number_in(folder / "cpu.cfs_period_us")),
        ):
            if quota is not None and period and quota > 0:
                found.append(quota / period)
    return min(found, default=None)


def _memory_limit() -> tuple[int | None, int]:
    """Return the limit and the usage of the control group with the least memory left."""
    tightest: tuple[int, int] | None = None
    for folder in control_chain("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most = number_in(folder / limit)
            if most is None or most >= _UNLIMITED:
                continue
            now = max(0, (number_in(folder / used) or 0) - _cached(folder))
            if tightest is None or most - now < tightest[0] - tightest[1]:
                tightest = most, now
    return tightest or (None, 0)


def _cached(folder: Path) -> int:
    try:
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def _near_memory() -> bool:
    """Return whether memory may come from a NUMA domain of this process's cores, or that is unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / "self/status").read_text().splitlines():
            if line.startswith("Mems_allowed_list:"):
                allowed = machine.core_list(line.partition(":")[2])
                return bool(allowed & (machine.domains(machine.measure().cores).keys() or {0}))
    return True
