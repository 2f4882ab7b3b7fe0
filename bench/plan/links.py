"""Fraction of a link's bandwidth that gloo reaches over TCP when several machines send to each other at once.

Each machine is a network namespace whose link is shaped. Each round sends a tensor from every machine to every other.

    python bench/plan/links.py                              # as root
    python bench/plan/links.py --rates 200 --megabytes 8
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

sys.path.append(str(Path(__file__).resolve().parent.parent / "machines"))
from namespaces import network, obstacle

ROUNDS = 7


def work(names: list[str], rank: int, rate: float, sizes: list[float]) -> None:
    """Exchange tensors in a namespace. Rank 0 prints a line for each size."""
    with open(f"/run/netns/{names[rank]}") as namespace:
        ctypes.CDLL(None).setns(namespace.fileno(), 0)
    os.environ |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29412", "GLOO_SOCKET_IFNAME": "eth0"}
    count = len(names)
    distributed.init_process_group("gloo", rank=rank, world_size=count)
    for size in sizes:
        sent, received = (torch.zeros(count, int(size * 2**18)) for _ in range(2))
        took = []
        for _ in range(ROUNDS):
            distributed.barrier()
            begin = time.perf_counter()
            awaited: list[Any] = [distributed.irecv(received[other], other) for other in range(count) if other != rank]
            awaited += [distributed.isend(sent[other], other) for other in range(count) if other != rank]
            for one in awaited:
                one.wait()
            distributed.barrier()
            took.append(time.perf_counter() - begin)
        seconds = statistics.median(took)
        reached = (count - 1) * size * 2**20 * 8 / seconds / (rate * 1e6)
        if rank == 0:
            about = f"{rate:5g} Mbit/s  {count} machines  {size:g} MB to each"
            print(f"{about}  {1000 * seconds:6.0f} ms  reached {reached:.2f} of the bandwidth", flush=True)


def main() -> None:
    """Print a line for each bandwidth, number of machines and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", default="2,3,4")
    parser.add_argument("--rates", default="1000,200", help="of the links, in Mbit/s")
    parser.add_argument("--megabytes", default="1,4,8")
    options = parser.parse_args()
    if missing := obstacle():
        raise SystemExit(f"left out, as {missing}")
    sizes = [*map(float, options.megabytes.split(","))]
    context = multiprocessing.get_context("fork")
    for rate in map(float, options.rates.split(",")):
        for count in map(int, options.machines.split(",")):
            with network(count, f"{rate:g}mbit") as names:
                workers = [context.Process(target=work, args=(names, rank, rate, sizes)) for rank in range(count)]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()


if __name__ == "__main__":
    main()
