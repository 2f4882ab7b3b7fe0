"""Layers whose costs differ by a factor of ten: the step time and its prediction from measured layers.

Rank 0 measures the layers (``partition.profile``), and the model is cut by them (``schedule.balance``). The prediction
is that of the simulated clock for these stages; only layers take time.
"""

from __future__ import annotations

import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from bubble import MICROBATCHES, SAMPLES
from launched import run
from sleeping import sleepers, targets
from torch import nn

import paceline
from paceline.partition.cut import layers_of
from paceline.partition.profile import measure as measure_layers
from paceline.schedule.balance import Cluster, LayerCost, balance
from paceline.schedule.pipeline.choice import synchronous_schedule
from paceline.schedule.pipeline.clock import Times, simulate
from paceline.settings import PipelineSettings

ASLEEP = (1, 4, 10, 2, 7, 1, 3, 9, 2, 5, 1, 6)
"""Costs of the sleeping layers, in units."""
HIDDEN = (256, 2560, 512, 1024, 256, 2048, 768, 1280)
"""Hidden units of the computing ones."""
WIDTH, WARM = 1024, 2


class Layer(nn.Module):
    """A perceptron with one hidden layer: its cost is in proportion to that."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(torch.relu(self.up(values)))


def work(given: dict[str, Any]) -> dict[str, Any]:
    """The step times, and what was predicted."""
    torch.manual_seed(0)
    if given["asleep"]:
        model, samples = sleepers([given["unit"] * units for units in ASLEEP], WIDTH), SAMPLES
    else:
        model, samples = nn.Sequential(*[Layer(hidden) for hidden in HIDDEN]), 64
    data = targets(MICROBATCHES * samples, WIDTH)
    features, target = (tensor[:samples] for tensor in data.tensors)
    layers = layers_of(model, features)
    costs = measure_layers(model, layers, features, lambda output: nn.functional.mse_loss(output, target))
    dist.init_process_group("gloo")
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, costs)  # all cut alike
    costs = gathered[0]
    cut = balance(costs, len(gathered), Cluster(microbatches=MICROBATCHES))
    session = paceline.start(
        model=model,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        loss=nn.functional.mse_loss,
        data=data,
        batch=MICROBATCHES * samples,
        microbatches=MICROBATCHES,
        strategy="pipeline",
        pipeline={"schedule": given["schedule"], "cut": cut.names},
        threads=1,
        timeout_seconds=120,
    )
    ends = []
    for batch in session.batches(steps=WARM + given["steps"]):
        session.step(batch)
        ends.append(time.monotonic())
    seconds = [after - before for before, after in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]
    dist.destroy_process_group()
    return {
        "seconds": median(seconds),
        "predicted": predicted(costs, cut.bounds, given["schedule"]),
        "bounds": cut.bounds,
        "cheapest": min(cost.forward + cost.backward for cost in costs),
        "dearest": max(cost.forward + cost.backward for cost in costs),
    }


def predicted(costs: list[LayerCost], bounds: tuple[tuple[int, int], ...], schedule: str) -> float:
    """Seconds of a step of these stages."""
    plan = synchronous_schedule(PipelineSettings(schedule=schedule), len(bounds), MICROBATCHES)  # type: ignore[arg-type]
    forward = tuple(sum(cost.forward for cost in costs[begin:end]) for begin, end in bounds)
    backward = tuple(sum(cost.backward for cost in costs[begin:end]) for begin, end in bounds)
    nothing = (0.0,) * len(bounds)
    return simulate(plan, Times(forward, nothing, backward, nothing[1:], nothing, nothing)).seconds


def measure(folder: Path, options: Namespace) -> list[dict[str, Any]]:
    """Print the table, and return its numbers."""
    print(f"\nlayers of very unequal cost, {MICROBATCHES} microbatches, milliseconds of a step")
    print(f"{'':34} {'dearest/cheapest':>17} {'predicted':>10} {'measured':>9} {'ratio':>7}  layers of the stages")
    results = []
    for asleep, workers, schedule in ((True, 4, "1f1b"), (True, 4, "gpipe"), (False, 2, "1f1b")):
        given = {"asleep": asleep, "unit": options.base / 5, "schedule": schedule, "steps": options.steps * 2}
        one = run(folder, "balance", workers, given).results[0]
        name = f"{'asleep' if asleep else 'computing'}, {workers} workers, {schedule}"
        print(
            f"{name:34} {one['dearest'] / one['cheapest']:17.1f} {1e3 * one['predicted']:10.1f} "
            f"{1e3 * one['seconds']:9.1f} {one['seconds'] / one['predicted']:7.3f}  "
            + " ".join(str(end - begin) for begin, end in one["bounds"])
        )
        results.append({"name": name, **one})
    return results
