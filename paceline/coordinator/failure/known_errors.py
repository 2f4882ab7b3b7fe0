"""Table of known errors, mostly of NCCL, gloo, torch's store and CUDA, with their meaning and advice.

The patterns match messages of PyTorch 2.13 and NCCL 2.18 to 2.28. ``docs/ten-errors.md`` shows each error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TRANSPORT = re.compile(
    r"c10d|gloo|nccl|torch\.distributed|Dist(Network|Store|Backend)Error|TCPStore|(client|server) socket"
    r"|could not reach (the|rank)|could not (open the|reach rank)|lost the store",
    re.IGNORECASE,
)
"""Matches messages of torch's transports, as opposed to other connections of a script."""
_WARNING = re.compile(r"^(\[rank\d+\]:)?\[W")  # matches warnings in torch's log, after which the process has continued

LESS_TO_HOLD = (
    "give each worker less to hold: more microbatches, recompute, fewer processes in workers_per_loader, or fewer "
    "workers on this machine"
)


@dataclass(frozen=True)
class KnownError:
    """Entry of the table of known errors."""

    name: str  # name that users search for
    pattern: str  # regular expression that matches the message, ignoring case
    means: str  # explanation in plain words
    causes: tuple[str, ...]  # usual causes, most frequent first
    cure: str  # advice
    transport: bool = False  # whether the entry only applies to texts that also name a transport
    kind: str = ""  # kind of the failure. Empty if this error does not determine it.
    doctor: str = ""  # check of ``paceline doctor`` that finds the problem before the start. Empty if there is none.

    @property
    def paragraph(self) -> str:
        """Meaning, causes, advice and check in one line."""
        check = f" `paceline doctor` tests it before the start ({self.doctor})." if self.doctor else ""
        return f"What it means: {self.means}. Usual causes: {'; '.join(self.causes)}. What to do: {self.cure}.{check}"


def find(text: str) -> KnownError | None:
    """Return the first entry of the table that matches the text of an error, or None."""
    of_transport = _TRANSPORT.search(text) is not None
    for one in KNOWN_ERRORS:
        if (of_transport or not one.transport) and re.search(one.pattern, text, re.IGNORECASE):
            return one
    return None


def explain(text: str) -> str:
    """Return the explanation of an error in one line. Empty if the error is unknown."""
    return known.paragraph if (known := find(text)) else ""


def find_printed(lines: list[str]) -> KnownError | None:
    """Return the known error in printed lines, ignoring torch's warnings, or None."""
    return find("\n".join(line for line in lines if not _WARNING.match(line)))


KNOWN_ERRORS = (
    KnownError(
        "Backward on a report",
        r"'float' object has no attribute '(backward|item|detach)'",
        "the loss of a report is a number, not a tensor",
        ("the loop takes report.loss for a tensor, as in report.loss.backward() or .item()",),
        "leave out backward(), zero_grad() and optimizer.step(): session.step has done all three",
    ),
    KnownError(
        "Input in a worker",
        r"EOF when reading a line|\bBdbQuit\b",
        "the script waits for input from the keyboard, and a worker reads nothing from the terminal",
        ("input(), or a question of a library", "breakpoint() or pdb.set_trace()"),
        "take the value from the arguments of the script or from the environment: `paceline run -n 2 train.py "
        "--lr 0.1`; for a debugger start one process: `python train.py`",
    ),
    KnownError(
        "Duplicate GPU detected",
        r"Duplicate GPU detected",
        "two workers chose the same GPU, which NCCL refuses",
        (
            "the script calls torch.cuda.set_device(0), or .cuda() before paceline.start",
            "more workers on a machine than GPUs",
            "CUDA_VISIBLE_DEVICES shows each worker one GPU, and it is the same one",
        ),
        "leave the device to paceline.start, or take LOCAL_RANK, never the global rank; start at most as many workers "
        "on a machine as `nvidia-smi -L` lists GPUs",
        doctor="visible GPUs",
    ),
    KnownError(
        "Invalid device ordinal",
        r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device is detected|no GPUs found",
        "a worker asked for a GPU that its process does not see",
        (
            "more workers on this machine than GPUs",
            "CUDA_VISIBLE_DEVICES, or the scheduler (--gpus-per-task), hides some of them",
            "the script uses its global rank as the number of the GPU",
        ),
        "compare `nvidia-smi -L` and CUDA_VISIBLE_DEVICES of the worker with the number of workers on its machine; use "
        "LOCAL_RANK, and --gpus-per-node rather than --gpus-per-task",
        doctor="visible GPUs",
    ),
    KnownError(
        "PyTorch without CUDA",
        r"Torch not compiled with CUDA enabled|doesn't have NCCL built in",
        "this PyTorch was built for the CPU alone",
        (
            "pip took the CPU wheel (its version ends in +cpu)",
            "a different environment from the tested one is active on this machine",
        ),
        "look at `python -c 'import torch; print(torch.__version__, torch.version.cuda)'` on each machine, and install "
        "the CUDA wheel there; or train with gloo on the CPU",
        doctor="visible GPUs",
    ),
    KnownError(
        "CUDA driver too old",
        r"driver version is insufficient|NVIDIA driver on your system is too old|forward compatibility was attempted",
        "the kernel's NVIDIA driver is older than the CUDA that PyTorch was built with",
        (
            "the driver of this machine was not updated with the others",
            "an image with a newer CUDA than its host's driver",
        ),
        "compare the CUDA version in `nvidia-smi` with torch.version.cuda; update the driver, or take a PyTorch built "
        "for an older CUDA",
        doctor="driver version",
    ),
    KnownError(
        "NCCL version mismatch",
        r"Mismatched NCCL version|NCCL.{0,40}version mismatch|Message truncated : received \d+ bytes instead of"
        r"|connecting to address with family \d+ is neither",
        "the workers use different versions of NCCL, which cannot talk to each other",
        (
            "another PyTorch, image or environment on one of the machines",
            "LD_LIBRARY_PATH or LD_PRELOAD puts the system's libnccl before PyTorch's",
        ),
        "print torch.cuda.nccl.version() on each machine, and install the same PyTorch; take libnccl out of "
        "LD_LIBRARY_PATH",
        transport=True,
        doctor="NCCL version",
    ),
    KnownError(
        "CUDA out of memory",
        r"CUDA out of memory|CUDA error: out of memory|Cuda failure (2 )?'out of memory'|CUBLAS_STATUS_ALLOC_FAILED"
        r"|Failed to CUDA (c|m)alloc",
        "the GPU cannot hold weights, gradients, optimizer state and the activations of one microbatch together",
        (
            "too large a microbatch",
            "another process on the same GPU",
            "tensors that the script keeps from step to step, such as losses with their graph",
            "free memory in pieces that are too small",
        ),
        "take more microbatches (each is smaller, the batch stays), or name module classes in recompute; see who else "
        "is in `nvidia-smi`; keep loss.item(), not the loss; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if much "
        "is reserved but free",
        kind="out-of-memory",
    ),
    KnownError(
        "Out of shared memory",
        r"unable to allocate shared memory|(/dev/shm|</torch_).*No space left|No space left.*/dev/shm"
        r"|shared memory segment|failed to extend /dev/shm|out of shared memory|Bus error|SIGBUS",
        "/dev/shm, through which loader processes, workers and NCCL pass data, is full",
        (
            "a container: its /dev/shm has 64 MB unless it is given more",
            "many processes in workers_per_loader, with large samples",
            "files that a killed run of something else has left there",
        ),
        "look at `df -h /dev/shm`; give the container --shm-size=8g, --ipc=host or in Kubernetes an emptyDir with "
        "medium: Memory; or take fewer workers_per_loader",
        doctor="/dev/shm",
    ),
    KnownError(
        "No space left on device",
        r"No space left on device|\[Errno 28\]|Disk quota exceeded",
        "the file system that was written to is full, or your share of it",
        ("checkpoints of earlier runs", "a full /tmp or home directory", "no inodes left: see `df -i`"),
        "look at `df -h` and `quota` for that path; remove old runs, keep fewer checkpoints (checkpoint.keep), or "
        "point checkpoint.directory and TMPDIR elsewhere",
        doctor="run directory",
    ),
    KnownError(
        "Too many open files",
        r"Too many open files|\[Errno 24\]",
        "the process has as many files and sockets open as its limit allows",
        (
            "a limit of 1024, while each worker holds sockets to all others",
            "loader processes that pass each tensor as a file descriptor, and a script that keeps the batches",
            "files that the data set opens and never closes",
        ),
        "raise the limit where the workers start (`ulimit -n 65536`, LimitNOFILE= of systemd, --ulimit nofile= of a "
        "container); for batches that are kept torch.multiprocessing.set_sharing_strategy('file_system')",
        doctor="open files",
    ),
    KnownError(
        "Locked memory",
        r"ibv_\w+.{0,60}(failed|Cannot allocate memory)|set max locked memory",
        "InfiniBand could not lock memory for its transfers, or its queues do not come up",
        ("a small limit of locked memory (`ulimit -l`)", "a container without the device or the right IPC_LOCK"),
        "`ulimit -l unlimited` where the workers start (limits.conf, LimitMEMLOCK= of slurmd, --ulimit memlock=-1 of a "
        "container); NCCL_IB_DISABLE=1 tells whether TCP works",
        doctor="locked memory",
    ),
    KnownError(
        "Out of memory",
        r"\bMemoryError\b|OutOfMemoryError|out of memory|can(not|'t) allocate memory",
        "the machine, or the limit of its container, has no memory left",
        (
            "each worker or loader process holds its own copy of the data set",
            "too large a microbatch",
            "a small limit of the cgroup",
        ),
        LESS_TO_HOLD + "; read the data from files that all can map",
        kind="out-of-memory",
        doctor="memory",
    ),
    KnownError(
        "Address already in use",
        r"EADDRINUSE|address already in use",
        "another process listens on this port already",
        (
            "a second run on the same machine with the same port",
            "a worker of an earlier run that still lives",
            "a script that opens a server on each of several workers",
        ),
        "`ss -ltnp` names the process: end it, or choose another port (--port, MASTER_PORT, --rdzv-endpoint of "
        "torchrun, where 0 takes a free one)",
        kind="port",
        doctor="rendezvous port",
    ),
    KnownError(
        "Unable to find address for an interface",
        r"Unable to find address for|no socket interface found|Unable to resolve hostname to a \(local\) address",
        "the network interface that was named does not exist on this machine, or has no address",
        (
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names one that this machine calls otherwise (eth0, ens5, ib0)",
            "the interface is down",
            "the machine cannot resolve its own name",
        ),
        "compare with `ip -brief address` on each machine; set both variables to what is there, or leave them unset: "
        "paceline run takes the interface that leads to the rendezvous",
        transport=True,
        doctor="network interface",
    ),
    KnownError(
        "A machine gives its loopback address",
        r"(refused|timed out).*remote=\[?(127\.|::1)",
        "the process that was to be reached said it was at 127.0.0.1: right on one machine, wrong for others",
        (
            "/etc/hosts maps the machine's own name to 127.0.0.1 or 127.0.1.1, and gloo believes it",
            "GLOO_SOCKET_IFNAME=lo from an earlier experiment",
            "on one machine: that process has since ended, see its log",
        ),
        "`getent hosts $(hostname)` must give an address that the others reach; else mend /etc/hosts, or set "
        "GLOO_SOCKET_IFNAME to the interface between the machines",
        transport=True,
        doctor="own name",
    ),
    KnownError(
        "Name or service not known",
        r"Name or service not known|name resolution|cannot be retrieved \(gai error|nodename nor servname",
        "this machine cannot turn the name of the other one into an address",
        (
            "a typing error in MASTER_ADDR or --rendezvous",
            "a name that only the other machine knows",
            "in Kubernetes: no headless Service, or the pod is not ready yet",
        ),
        "try `getent hosts NAME` on this machine; give an address instead, or the full name with its domain",
        transport=True,
        doctor="rendezvous name",
    ),
    KnownError(
        "No route to host",
        r"No route to host|Network is unreachable|EHOSTUNREACH|ENETUNREACH",
        "this machine's network does not lead to the address of the other one",
        (
            "the address of another network: of a container bridge, of Wi-Fi, of InfiniBand on one side only",
            "a firewall that rejects",
            "the other machine is down",
        ),
        "try `ip route get ADDRESS` and `ping ADDRESS`; name the interface that both share in GLOO_SOCKET_IFNAME and "
        'NCCL_SOCKET_IFNAME (the address that PyTorch 2.13 prints after "failed to connect to" may be garbled: that '
        "in brackets is right)",
        transport=True,
        doctor="rendezvous port",
    ),
    KnownError(
        "Mismatch of collectives",
        r"mismatch between collectives|data size doesn't match expected size|op\.preamble\.\w+ <= op\.nbytes"
        r"|Mismatched collective|collective mismatch error|to match sizes of the same param",
        "the ranks called different collectives, or with tensors of different shapes",
        (
            "a branch on the rank or on local data around a collective",
            "models of different shape, or parameters in another order, on some ranks",
            "a last batch that is smaller on some ranks",
        ),
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names both calls; for those of the script itself Paceline compares them and "
        "says which lines differ",
    ),
    KnownError(
        "Collective timed out",
        r"Watchdog caught collective operation timeout|Some NCCL operations have failed or timed out"
        r"|Timed out waiting \d+ms for (recv|send) operation|monitoredBarrier",
        "a rank waited in a collective for another rank that did not reach it in time",
        (
            "one rank is elsewhere: it loads data, saves, evaluates, or has left the loop early",
            "one rank failed or was killed without closing its connections: its log has the true cause",
            "a collective that only some ranks call",
            "a network that drops packets, or a GPU that hangs (Xid in `dmesg`)",
        ),
        "find the rank that is not in the collective (`py-spy dump --pid`), and read its log first; a longer timeout "
        "helps only if that rank is slow, not stuck",
    ),
    KnownError(
        "Not all workers came",
        r"waiting for clients\. \d+/\d+ clients joined|wait timeout after \d+ms, keys:",
        "the store ran, but some workers did not reach the same place in time",
        (
            "a worker failed before: its log has the cause",
            "fewer were started than WORLD_SIZE says, or two with the same rank",
            "machines that start minutes apart",
        ),
        "count the workers that run and look at the output of those that are missing; give all the same WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT; a longer timeout_seconds if they are only late",
        transport=True,
    ),
    KnownError(
        "Connection refused",
        r"Connection refused|ECONNREFUSED",
        "the machine answers, but no process listens on that port",
        (
            "the process there has ended, or has not started yet: its log has the cause",
            "a wrong port, or the address of another machine",
            "a firewall that rejects",
        ),
        "read the output of the rank at that address; see with `ss -ltn` there whether something listens, and on which "
        "address",
        transport=True,
        doctor="ports",
    ),
    KnownError(
        "Connection timed out",
        r"socket has timed out|connection timed out|Connect timeout|timed out connecting|timed out \(try=",
        "nothing answered at that address in time",
        (
            "rank 0 has not started, failed at once, or listens elsewhere",
            "a firewall that drops: gloo and NCCL take any free ports, not MASTER_PORT alone",
            "a wrong MASTER_ADDR, or a name that does not resolve here: see the lines above",
        ),
        "look at the output of rank 0 first; then try `nc -zv ADDRESS PORT` from this machine while it runs, and open "
        "all TCP ports between the machines of the run",
        transport=True,
        doctor="ports",
    ),
    KnownError(
        "Connection reset or closed by peer",
        r"closed by peer|closed by remote peer|reset by peer|Broken pipe|Failed to recv, got 0 bytes"
        r"|Connection was likely closed|remote process exited|ncclRemoteError",
        "the process at the other end has gone: this one only noticed it",
        (
            "another rank failed or was killed: its log has the true cause",
            "the kernel ended it for lack of memory (`dmesg`), or the scheduler did",
            "a network link that went down",
        ),
        "look for the rank that ended first, and read its log; with --elastic MIN:MAX the others continue without it",
        transport=True,
    ),
    KnownError(
        "Unhandled CUDA error",
        r"unhandled cuda error|ncclUnhandledCudaError",
        "a call to CUDA failed inside NCCL: the GPU or its driver, not the network",
        (
            "no memory left on the GPU for NCCL's buffers",
            "GPUs of the same machine that may not see each other: --gpus-per-task, a container, MIG",
            "another driver or CUDA than PyTorch's",
            "a GPU that fails (Xid in `dmesg`)",
        ),
        'read "Last error" below it; NCCL_DEBUG=INFO says which call; NCCL_P2P_DISABLE=1 tells whether it is the path '
        "between the GPUs",
    ),
    KnownError(
        "Unhandled system error",
        r"unhandled system error|ncclSystemError|ncclInternalError",
        "a call to the operating system failed inside NCCL, most often one of the network",
        (
            "NCCL took an interface that does not lead to the other machines (docker0, a VPN)",
            "a firewall between the machines",
            "too small a /dev/shm, or too few open files or too little locked memory",
        ),
        'read "Last error" below it; NCCL_DEBUG=INFO says which call; name the interface in NCCL_SOCKET_IFNAME; look '
        "at `df -h /dev/shm`, `ulimit -n` and `ulimit -l`",
        doctor="ports",
    ),
)
"""All entries. More specific patterns come first."""
