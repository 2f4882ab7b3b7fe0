"""Checks of a machine's limits for its workers: pure functions from limits to findings."""

from __future__ import annotations

from paceline.diagnostics.doctor.finding import Finding, ok, size
from paceline.diagnostics.doctor.limits import Limits
from paceline.errors import counted
from paceline.launchers.machine import files_needed, processes_needed

_GB = 10**9
_FEW_FILES, _TOO_FEW_FILES = 1024, 256
_LITTLE_LOCKED = 1 << 20
_LITTLE_SHARED, _TOO_LITTLE_SHARED = 512 * 10**6, 80 * 10**6
_LITTLE_MEMORY, _TOO_LITTLE_MEMORY = 2 * _GB, _GB // 2


def check_limits(limits: Limits, workers: int) -> list[Finding]:
    """Return the findings of all checks of this process's limits."""
    return [
        open_files(limits, workers),
        processes(limits, workers),
        locked_pages(limits),
        shared_memory(limits, workers),
        memory(limits, workers),
        cpu_quota(limits),
        cores(limits, workers),
        numa(limits),
    ]


def open_files(limits: Limits, workers: int) -> Finding:
    check = "open files"
    needed = files_needed(workers, workers)
    if limits.files is None or limits.files >= max(_FEW_FILES, needed):
        return ok(check, f"{limits.files or 'no limit'} file descriptors")
    return Finding(
        check,
        "failure" if limits.files < max(_TOO_FEW_FILES, needed) else "warning",
        f"too few file descriptors: a process may open {limits.files} (ulimit -n), "
        f"{counted(workers, 'worker')} need {needed}",
        "Every connection between workers and every file of a data loader takes one; without one a worker fails with "
        "'Too many open files'.",
        "ulimit -n 65536 before the start; for good in /etc/security/limits.conf (nofile), or LimitNOFILE= of the "
        "service, or --ulimit nofile= of the container",
    )


def processes(limits: Limits, workers: int) -> Finding:
    check = "processes"
    needed = processes_needed(workers)
    if limits.processes is None or limits.processes >= needed:
        return ok(check, f"{limits.processes or 'no limit'} processes and threads")
    return Finding(
        check,
        "failure",
        f"too few processes: this user may have {limits.processes} (ulimit -u), {workers} workers need {needed}",
        "Each thread counts, of all that this user runs; one more fails with 'Resource temporarily unavailable' or "
        "'can't start new thread'.",
        f"ulimit -u {2 * needed} before the start; for good nproc in /etc/security/limits.conf, or --pids-limit of the "
        f"container; or start fewer workers here",
    )


def locked_pages(limits: Limits) -> Finding:
    check = "locked memory"
    allowed = "no limit" if limits.locked is None else f"{size(limits.locked)} (ulimit -l)"
    cards = f"; RDMA cards: {', '.join(limits.rdma)}" if limits.rdma else ""
    if limits.locked is None or (not limits.rdma and limits.locked >= _LITTLE_LOCKED):
        return ok(check, allowed + cards)
    return Finding(
        check,
        "failure" if limits.rdma else "warning",
        f"too little locked memory: {allowed}{cards}",
        "InfiniBand, RoCE and EFA cards, and pinned buffers, need memory that is not swapped; NCCL then fails with "
        "'unhandled system error' or 'Cannot allocate memory'.",
        "ulimit -l unlimited before the start; for good in /etc/security/limits.conf (memlock), or LimitMEMLOCK= of "
        "the service, or --ulimit memlock=-1 of the container",
    )


def shared_memory(limits: Limits, workers: int) -> Finding:
    check = "/dev/shm"
    failed = True
    if limits.shared_size is None:
        values = "/dev/shm is not there"
    elif not limits.shared_writable:
        values = "/dev/shm cannot be written"
    else:
        values = f"{size(limits.shared_free)} free of {size(limits.shared_size)}"
        if limits.shared_free >= _LITTLE_SHARED:
            return ok(check, values)
        values = f"too small: {values}"
        failed = limits.shared_free < _TOO_LITTLE_SHARED and workers > 1
    return Finding(
        check,
        "failure" if failed else "warning",
        values,
        "Workers of one machine exchange gradients through it, and data loaders their batches; when it is full a "
        "process dies with SIGBUS. Containers have 64 MB by default.",
        "give the container more (--shm-size=8g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm), "
        "mount -o remount,size=8G /dev/shm, or remove old files there",
    )


def memory(limits: Limits, workers: int) -> Finding:
    check = "memory"
    left, whose = limits.available, f"{size(limits.available)} free of {size(limits.memory)}"
    if limits.memory_limit is not None and limits.memory_limit - limits.memory_used < left:
        left = max(0, limits.memory_limit - limits.memory_used)
        whose = (
            f"control group's memory limit {size(limits.memory_limit)} ({size(left)} left), machine's memory "
            + size(limits.memory)
        )
    each = left / workers
    if each >= _LITTLE_MEMORY or not limits.memory:
        return ok(check, whose)
    return Finding(
        check,
        "failure" if each < _TOO_LITTLE_MEMORY else "warning",
        f"too little memory: {whose}; {size(each)} for each of {counted(workers, 'worker')}",
        "Python and torch alone take half a gigabyte in each worker; a process that takes more is killed with "
        "signal 9.",
        "start fewer workers here, end other programs, or raise the limit (--memory of the container, "
        "resources.limits.memory of the pod, --mem of the Slurm job)",
    )


def cpu_quota(limits: Limits) -> Finding:
    check = "CPU quota"
    if limits.quota is None or limits.quota >= limits.cores:
        return ok(check, "none" if limits.quota is None else f"{limits.quota:g} of {limits.cores} cores")
    return Finding(
        check,
        "warning",
        f"the control group gives the time of {limits.quota:g} cores, and {limits.cores} are visible",
        "Libraries start a thread for each visible core; when the quota is used up all of them stop for the rest of "
        "100 ms, and every other worker waits for this one.",
        f"raise the quota (--cpus of the container, resources.limits.cpu of the pod), or --set "
        f"threads={max(1, int(limits.quota))}",
    )


def cores(limits: Limits, workers: int) -> Finding:
    check = "cores"
    values = f"{limits.cores} of {limits.all_cores} for {counted(workers, 'worker')}"
    if workers <= limits.cores:
        return ok(check, values)
    return Finding(
        check,
        "warning",
        f"more workers than cores: {values}",
        "Workers that share a core take turns, and a step lasts as long as its slowest worker.",
        "start fewer workers here, or give this process more cores (taskset, cpuset, --cpus-per-task)",
    )


def numa(limits: Limits) -> Finding:
    check = "NUMA"
    values = counted(limits.domains, "memory domain")
    if limits.near_memory:
        return ok(check, values)
    return Finding(
        check,
        "warning",
        f"{values}: this process may not take memory from the domain of its own cores",
        "All its memory is then on the far side of the link between the domains.",
        "bind cores and memory alike: numactl --cpunodebind=N --membind=N, or cpuset.mems beside cpuset.cpus",
    )
