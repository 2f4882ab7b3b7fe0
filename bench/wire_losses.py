"""Loss after equal samples with each format on the wire, over float32: a small GPT, a convolution net, a perceptron.

One process trains each model with ``exact=True``, which gives the bits of any number of workers. The loss is the mean
over the last fifth of the steps; the table has the mean of the seeds, and the largest of them.

The steps to a loss are those until the mean loss of a fifth of the steps has fallen to that of float32 before the last
fifth, over those of float32. With ``--seconds``, they are multiplied by the seconds of a step, such as those that
``bench/wire.py`` measures where the network is the limit.

    python bench/wire_losses.py
    python bench/wire_losses.py --tasks mlp --formats bfloat16,int8 --seconds 0.52,0.41
    python bench/wire_losses.py --tasks mlp --formats int4 --microbatches 4 --seeds 1
    python bench/wire_losses.py --formats fp8-e4m3,fp8-e5m2 --unscaled      # without the scales of the parameters
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch
from models import GPT
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import paceline
from paceline.step.gradients import formats
from paceline.step.gradients.floats import Rounded
from paceline.strategies.base import WIRES

LENGTH = 64


def text(length: int, letters: int = 48) -> list[int]:
    """Characters of which each is drawn from four, by chance, that follow the two before it. Some are more frequent."""
    chance = torch.Generator().manual_seed(0)
    frequency = 1 / torch.arange(1.0, letters + 1)
    follow = torch.multinomial(frequency, letters**2 * 4, replacement=True, generator=chance)
    table = follow.view(letters, letters, 4).tolist()
    drawn = torch.multinomial(torch.tensor([0.6, 0.2, 0.1, 0.1]), length, replacement=True, generator=chance).tolist()
    found = [0, 1]
    for one in drawn:
        found.append(table[found[-2]][found[-1]][one])
    return found[2:]


def gpt(samples: int = 6000) -> dict[str, Any]:
    """Characters of a generated text, 120,000 parameters."""
    rows = torch.tensor(text(samples * LENGTH)).view(-1, LENGTH)
    data = TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    return {
        "model": GPT(64, 2, 4),
        "optimizer": partial(torch.optim.AdamW, lr=2e-3),
        "loss": lambda output, target: cross_entropy(output.flatten(0, 1), target.flatten()),
        "data": data,
        "batch": 32,
    }


def convolutions() -> dict[str, Any]:
    """Noisy images of ten classes, 10,000 parameters, batch normalization."""
    chance = torch.Generator().manual_seed(0)
    patterns, kinds = torch.randn(10, 3, 16, 16, generator=chance), torch.randint(10, (8000,), generator=chance)
    images = patterns[kinds] * 0.35 + torch.randn(8000, 3, 16, 16, generator=chance)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
    return {
        "model": nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10)),
        "optimizer": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
        "loss": cross_entropy,
        "data": TensorDataset(images, kinds),
        "batch": 64,
    }


def perceptron() -> dict[str, Any]:
    """Vectors of ten classes, 20,000 parameters."""
    chance = torch.Generator().manual_seed(0)
    vectors = torch.randn(8000, 20, generator=chance)
    scores = vectors @ torch.randn(20, 10, generator=chance) + vectors**2 @ torch.randn(20, 10, generator=chance)
    layers = (nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return {
        "model": nn.Sequential(*layers),
        "optimizer": partial(torch.optim.AdamW, lr=1e-3),
        "loss": cross_entropy,
        "data": TensorDataset(vectors, scores.argmax(1)),
        "batch": 64,
    }


TASKS: dict[str, Callable[[], dict[str, Any]]] = {"gpt": gpt, "conv": convolutions, "mlp": perceptron}


def losses_of(task: str, wire: str, seed: int, steps: int, microbatches: int) -> list[float]:
    """Train, and return the loss of each step."""
    torch.manual_seed(seed)
    given = TASKS[task]() | {"seed": seed, "exact": True, "wire": wire, "microbatches": microbatches}
    session = paceline.start(strategy="single", audit="off", **given)
    return [session.step(batch).loss for batch in session.batches(steps=steps)]


def steps_to(target: float, losses: Sequence[float]) -> float:
    """Return the number of steps until the mean loss of a fifth of all steps is at the target; infinite if never."""
    window = len(losses) // 5
    ends = range(window, len(losses) + 1)
    return next((end for end in ends if fmean(losses[end - window : end]) <= target), float("inf"))


def unscale() -> None:
    """Let formats of floating-point numbers round gradients as they are."""
    formats.Scaled = lambda dtype, nodes, microbatches: Rounded(dtype, nodes)  # type: ignore[assignment,misc]


def main() -> None:
    """Print a line for each task and format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--formats", default=",".join(WIRES[1:]))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unscaled", action="store_true", help="leave out the scales of floating-point formats")
    parser.add_argument(
        "--seconds", help="of a step with each format, over those of float32: also print those to a loss"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.unscaled:
        unscale()
    last, wires = options.steps // 5, options.formats.split(",")
    seconds = dict(zip(wires, map(float, options.seconds.split(",")), strict=True)) if options.seconds else {}
    for task in options.tasks.split(","):
        train = partial(losses_of, task, steps=options.steps, microbatches=options.microbatches)
        plain = [train("float32", seed) for seed in range(options.seeds)]
        ends, targets = ([fmean(losses[begin:][:last]) for losses in plain] for begin in (-last, -2 * last))
        print(f"{task:>5}  {'float32':>9}  {fmean(ends):.4f}", flush=True)
        before = [steps_to(target, losses) for target, losses in zip(targets, plain, strict=True)]
        for wire in wires:
            found = [train(wire, seed) for seed in range(options.seeds)]
            over = [fmean(losses[-last:]) / end - 1 for losses, end in zip(found, ends, strict=True)]
            needed = fmean(steps_to(*pair) / steps for *pair, steps in zip(targets, found, before, strict=True))
            to_loss = f"  to the loss: steps {needed:.2f}" + f", seconds {needed * seconds.get(wire, 1):.2f}" * bool(
                seconds
            )
            print(f"{task:>5}  {wire:>9}  {fmean(over):+.2%}  largest {max(over, key=abs):+.2%}{to_loss}", flush=True)


if __name__ == "__main__":
    main()
