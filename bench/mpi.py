"""Latency and bandwidth of the back end "mpi4py" beside raw mpi4py and gloo: ping-pong, and all-reduce.

All three run in the same processes and take turns; the table has the median microseconds of one message there and back,
halved, and of one all-reduce, for each size, and the ratios of the back end to the other two.

    mpiexec -n 2 python bench/mpi.py
    mpiexec -n 2 python bench/mpi.py --rounds 50 --bytes 8,1048576
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import paceline.comm.mpi.register  # noqa: F401 - makes the back end known
from paceline.comm.mpi.library import initialized

MPI = initialized()
SIZES = "8,4096,65536,1048576,16777216"
_WARM_UP = 3


def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The same ranks over MPI and over gloo."""
    world = MPI.COMM_WORLD
    port = 0
    if world.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(world.bcast(port))}
    dist.init_process_group("mpi4py", rank=world.rank, world_size=world.size)
    over_mpi = dist.group.WORLD
    assert over_mpi is not None
    return over_mpi, dist.new_group(backend="gloo")


def ways(tensor: torch.Tensor) -> dict[str, dict[str, Callable[[], object]]]:
    """What is timed: for each operation, by the names of the ways."""
    world, rank = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
    raw, other = tensor.numpy(), 1 - rank
    over_mpi, over_gloo = GROUPS

    def ping_pong(send: Callable[[], object], receive: Callable[[], object]) -> Callable[[], object]:
        first, second = (send, receive) if rank == 0 else (receive, send)
        return lambda: (first(), second())

    def by_torch(group: dist.ProcessGroup) -> Callable[[], object]:
        return ping_pong(lambda: dist.send(tensor, other, group), lambda: dist.recv(tensor, other, group))

    both = {
        "mpi4py": ping_pong(lambda: world.Send(raw, other), lambda: world.Recv(raw, other)),
        "back end": by_torch(over_mpi),
        "gloo": by_torch(over_gloo),
    }
    sums: dict[str, Callable[[], object]] = {
        "mpi4py": lambda: world.Allreduce(MPI.IN_PLACE, raw),
        "back end": lambda: dist.all_reduce(tensor, group=over_mpi),
        "gloo": lambda: dist.all_reduce(tensor, group=over_gloo),
    }
    return {"all-reduce": sums} if world.size != 2 else {"ping-pong": both, "all-reduce": sums}


def measure(size: int, rounds: int) -> None:
    """Print the medians of one size."""
    tensor = torch.zeros(max(size // 4, 1))
    for operation, made in ways(tensor).items():
        seconds: dict[str, list[float]] = {name: [] for name in made}
        for turn in range(rounds + _WARM_UP):
            for name in sorted(made, reverse=turn % 2 == 1):
                MPI.COMM_WORLD.Barrier()
                begin = time.perf_counter()
                made[name]()
                seconds[name].append(time.perf_counter() - begin)
        each = 2 if operation == "ping-pong" else 1
        median = {name: statistics.median(values[_WARM_UP:]) / each for name, values in seconds.items()}
        if MPI.COMM_WORLD.rank == 0:
            times = "".join(f"{1e6 * value:>12.1f}" for value in median.values())
            ratios = "".join(f"{median['back end'] / median[name]:>12.2f}" for name in ("mpi4py", "gloo"))
            print(f"{operation:<12}{size:>10}{times}{ratios}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default=SIZES, help="sizes of a message, separated by commas")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    GROUPS = groups()
    torch.set_num_threads(1)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{MPI.COMM_WORLD.size} processes, median microseconds of {options.rounds} rounds")
        names = "".join(f"{name:>12}" for name in ("mpi4py", "back end", "gloo", "/ mpi4py", "/ gloo"))
        print(f"{'':<12}{'bytes':>10}{names}")
    for size in map(int, options.bytes.split(",")):
        measure(size, options.rounds if size < 2**22 else max(options.rounds // 10, 1))
    dist.destroy_process_group()
