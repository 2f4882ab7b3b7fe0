"""Samples of a simulated run, which its script adds after some steps, and what must hold for them."""

from __future__ import annotations

from functools import cache

from paceline.data.growing.agreement import encoded
from paceline.data.growing.order import Additions, GrowingOrder
from paceline.data.growing.samples import Growing
from paceline.training.progress import EXTEND
from simulator.world import Broken

EXTENDS = (1, 2, 5)  # steps after which the script adds samples: at the end of the first epoch, and within others


def data() -> Growing:
    """Return the data set, with the samples before training."""
    return Growing([f"initial {number}" for number in range(12)])


def order_of(samples: Growing, microbatches: int) -> GrowingOrder:
    return GrowingOrder(samples, microbatches, microbatches, seed=0, drop_last=False)


def made_after(step: int) -> list[str]:
    return [f"step {step}: {number}" for number in range(3 + step)]


@cache
def _expected(microbatches: int, steps: int) -> tuple[list[list[list[str]]], list[str]]:
    """Return the samples of each microbatch of each step, and of the data set at the end, without any fault."""
    samples = data()
    order, found = order_of(samples, microbatches), []
    for step in range(steps):
        found.append([[samples[number] for number in numbers] for numbers in order.microbatches_of(step)])
        if step in EXTENDS:
            order.add_result(EXTEND, (step + 1, -1, 1), Additions(encoded(made_after(step)), step + 1, step + 1))
    return found, list(samples)


def check(order: GrowingOrder, step: int, steps: int) -> None:
    """Raise Broken unless this worker has the right samples for a step of a run of ``steps`` steps."""
    wanted = _expected(order.microbatches, steps)[0][step]
    numbers = order.microbatches_of(step)
    found = [[order.data[number] for number in microbatch] for microbatch in numbers]
    if found != wanted:
        raise Broken(f"step {step} with the samples {found} instead of {wanted}")


def check_end(order: GrowingOrder, steps: int) -> None:
    """Raise Broken unless the data set has exactly the samples that the script has added."""
    if list(order.data) != _expected(order.microbatches, steps)[1]:
        raise Broken(f"the samples at the end are {list(order.data)}")
