"""Speed-up against the number of processes, each on a core of its own: python speedup.py [--most N] [--plot FILE]"""

import argparse
import os
import re
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from averaging import average_gradients
from torch.nn.functional import cross_entropy

SAMPLES = 512


def worker(steps):
    """Train for some steps on this rank's part, and print the samples per second of all ranks."""
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # else two processes may share a core, and another idles
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
    inputs, targets = torch.randn(SAMPLES, 256)[rank::size], torch.randint(10, (SAMPLES,))[rank::size]
    for step in range(steps + 1):
        if step == 1:  # the first one is slower
            dist.barrier()
            begin = time.perf_counter()
        model.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        average_gradients(model, len(inputs), SAMPLES)
    dist.barrier()
    if rank == 0:
        print(f"rate {SAMPLES * steps / (time.perf_counter() - begin)}", flush=True)
    dist.destroy_process_group()


def main():
    """Start the worker with 1, 2, ... processes and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--plot", help="file for a picture, by matplotlib")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments.steps)
        return
    rates = []
    for count in range(1, arguments.most + 1):
        command = [sys.executable, "-m", "paceline", "run", "-n", str(count), __file__, "--steps", str(arguments.steps)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rates.append(float(re.findall(r"rate ([0-9.]+)", said)[0]))
        print(f"{count} processes: {rates[-1]:.0f} samples/s, {rates[-1] / rates[0]:.2f} times one", flush=True)
    if arguments.plot:
        from matplotlib import pyplot

        counts = range(1, arguments.most + 1)
        pyplot.plot(counts, [rate / rates[0] for rate in rates], "o-", label="measured")
        pyplot.plot(counts, counts, "--", label="ideal")
        pyplot.xlabel("processes")
        pyplot.ylabel("times one process")
        pyplot.legend()
        pyplot.savefig(arguments.plot)


if __name__ == "__main__":
    main()
