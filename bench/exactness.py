"""How far the mean gradient is from the true one: along the tree, in fixed point, and as a running sum.

A model is trained for some steps. In each, the gradients of the microbatches are added up in each way, and compared
with the mean in float64. Prints, over all steps, the median and the largest error of a parameter's mean (in the
2-norm, relative), the part of elements that became zero although they are not, and the number of repeated steps.

    python bench/exactness.py                         # both models, 8 and 64 microbatches
    python bench/exactness.py --tasks mlp-2M --steps 200
"""

from __future__ import annotations

import argparse
import statistics
from types import SimpleNamespace
from typing import Any, cast

import torch
from models import TASKS, Task
from torch import nn

from paceline.step.gradients.accumulate import Accumulator, Values
from paceline.step.gradients.codec import Codec
from paceline.step.gradients.fixed_point import WholeNumbers


class InFixedPoint:
    """Return the means in fixed point, and the number of steps that were repeated for them."""

    def __init__(self, model: nn.Module, microbatches: int) -> None:
        self.repeated = 0
        context = SimpleNamespace(
            update=SimpleNamespace(parameters=dict(model.named_parameters())),
            order=SimpleNamespace(microbatches=microbatches),
            world=SimpleNamespace(device=torch.device("cpu")),
            events=SimpleNamespace(mark=self._count),
            strategy_state={},
        )
        formats = [WholeNumbers(value.dtype, microbatches) for value in model.parameters()]
        self._fixed = Codec(cast(Any, context), formats)

    def _count(self, event: str, **values: object) -> None:
        self.repeated += 1

    def means(self, gradients: list[list[torch.Tensor]]) -> Values:
        while True:
            sums = Accumulator(exact=False)
            for place, values in enumerate(gradients):
                sums.push(place, self._fixed.encode([value.clone() for value in values], 0, place))
            if self._fixed.fits():
                break
        means = self._fixed.decode(sums.total(), float(len(gradients)))
        self._fixed.accept()
        return means


def in_floats(gradients: list[list[torch.Tensor]], tree: bool) -> Values:
    """The means in float32, along the tree or as a running sum."""
    sums = Accumulator(exact=tree)
    for place, values in enumerate(gradients):
        sums.push(place, [value.clone() for value in values])
    return [value / len(gradients) for value in sums.total() if value is not None]


def gradients_of(model: nn.Module, task: Task, features: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """Of the loss of one microbatch."""
    model.zero_grad()
    task.loss(model(features), target).backward()
    return [value.grad.clone() for value in model.parameters() if value.grad is not None]


def compare(task: Task, microbatches: int, steps: int) -> list[str]:
    """Train, and give a line for each way."""
    torch.manual_seed(0)
    model = task.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fixed = InFixedPoint(model, microbatches)
    errors: dict[str, list[float]] = {"tree": [], "fixed point": [], "running sum": []}
    zeros = dict.fromkeys(errors, 0)
    elements = 0
    for _ in range(steps):
        batches = (task.data(task.microbatch).tensors for _ in range(microbatches))
        gradients = [gradients_of(model, task, *batch) for batch in batches]
        true = [torch.stack([one.double() for one in same]).mean(0) for same in zip(*gradients, strict=True)]
        ways = {
            "tree": in_floats(gradients, tree=True),
            "fixed point": fixed.means(gradients),
            "running sum": in_floats(gradients, tree=False),
        }
        elements += sum(int((value != 0).sum()) for value in true)
        for way, means in ways.items():
            for mean, value in zip(means, true, strict=True):
                assert mean is not None
                if value.any():
                    errors[way].append(float((mean - value).norm() / value.norm()))
                zeros[way] += int(((mean == 0) & (value != 0)).sum())
        for parameter, value in zip(model.parameters(), true, strict=True):
            parameter.grad = value.float()
        optimizer.step()
    name = f"{task.name}, {microbatches} microbatches"
    return [
        f"{name:<26} {way:<12} median {statistics.median(found):.1e}  largest {max(found):.1e}  "
        f"became zero {zeros[way] / elements:.1e}"
        + (f"  repeated {fixed.repeated} of {steps} steps" if way == "fixed point" else "")
        for way, found in errors.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["mlp-2M", "gpt-10M"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.tasks:
        for microbatches in arguments.microbatches:
            for line in compare(TASKS[name], microbatches, arguments.steps):
                print(line, flush=True)


if __name__ == "__main__":
    main()
