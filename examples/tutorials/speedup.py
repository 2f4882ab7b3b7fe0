"""Speed-up on 1 to N workers, and Amdahl's law fitted to it: python speedup.py [--most N] [--plot FILE]"""

import argparse
import tempfile
import time
from functools import partial

import torch
from torch.utils.data import TensorDataset

import paceline

MICROBATCHES, PARALLEL, SERIAL = 8, 0.02, 0.02  # seconds of a microbatch, and of what every worker does in a step


def loss(model, microbatch):
    """Sleep instead of computing, so that workers need no core of their own."""
    time.sleep(PARALLEL)
    return torch.nn.functional.mse_loss(model(microbatch[0]), microbatch[1])


def train(steps):
    """Return the seconds of the fastest half of the steps, on average."""
    inputs = torch.ones(64, 4)
    session = paceline.start(
        model=torch.nn.Linear(4, 1),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        forward=loss,
        data=TensorDataset(inputs, inputs[:, :1]),
        batch=64,
        microbatches=MICROBATCHES,
    )
    seconds = []
    for batch in session.batches(steps=steps):
        time.sleep(SERIAL)  # work that is not divided, such as logging or a slow update
        seconds.append(session.step(batch).seconds + SERIAL)
    return sum(sorted(seconds)[: steps // 2]) / (steps // 2)


def amdahl(counts, seconds):
    """Return serial and parallel seconds: the line t = serial + parallel x (largest share) with the least squares."""
    shares = [-(-MICROBATCHES // count) / MICROBATCHES for count in counts]
    left = torch.tensor([[1.0, share] for share in shares])
    return torch.linalg.lstsq(left, torch.tensor(seconds)[:, None]).solution.flatten().tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=4, help="workers")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--plot", help="file for a picture, by matplotlib")
    arguments = parser.parse_args()
    counts, seconds = list(range(1, arguments.most + 1)), []
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            seconds.append(paceline.launch(train, arguments.steps, workers=count, runs_dir=folder)[0])
            ratio = seconds[0] / seconds[-1]
            print(
                f"{count} workers: {seconds[-1]:.3f} s, speed-up {ratio:.2f}, efficiency {ratio / count:.0%}",
                flush=True,
            )
    serial, parallel = amdahl(counts, seconds)
    print(f"serial {serial:.3f} s, parallel {parallel:.3f} s, at most {(serial + parallel) / serial:.1f} times as fast")
    if arguments.plot:
        from matplotlib import pyplot

        pyplot.plot(counts, [seconds[0] / one for one in seconds], "o-", label="measured")
        pyplot.plot(counts, counts, "--", label="ideal")
        pyplot.plot(counts, [(serial + parallel) / (serial + parallel / n) for n in counts], ":", label="Amdahl")
        pyplot.xlabel("workers")
        pyplot.ylabel("times as fast as one")
        pyplot.legend()
        pyplot.savefig(arguments.plot)
