"""Zero bubble (Qi et al. 2024, arXiv 2401.10241): the gradients for the weights fill the gaps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from paceline.schedule.operations import Kind, Operation, Schedule
from paceline.schedule.transfers import Order, at_least, connected, side_by_side


def zero_bubble_h1(stages: int, microbatches: int, replicas: int = 1) -> Schedule:
    """ZB-H1: 1F1B whose later stages put off the gradients for the weights, stage s by s microbatches.

    Args:
        stages: workers of one pipeline.
        microbatches: of all pipelines.
        replicas: how many pipelines share the microbatches.

    Raises:
        ConfigError: no stages, or fewer microbatches than replicas.
    """
    at_least(1, stages=stages)

    def order(stage: int, microbatches: int) -> Order:
        lead = stages - 1 - stage
        order = []
        for turn in range(microbatches + stages - 1):
            for kind, late in ((Kind.FORWARD, 0), (Kind.INPUT, lead), (Kind.WEIGHT, lead + stage)):
                if 0 <= turn - late < microbatches:
                    order.append(Operation(kind, stage, turn - late))
        return order

    return connected("zb-h1", stages, microbatches, side_by_side(order, stages, microbatches, replicas))


def zero_bubble_v(workers: int, microbatches: int, replicas: int = 1) -> Schedule:
    """ZB-V: worker w of P holds the stages w and 2 P - 1 - w, so the model goes forth and back over the workers.

    Args:
        workers: of one pipeline.
        microbatches: of all pipelines.
        replicas: how many pipelines share the microbatches.

    Raises:
        ConfigError: no workers, or fewer microbatches than replicas.
    """
    at_least(1, workers=workers)

    def order(worker: int, microbatches: int) -> Order:
        whole = _v(worker, workers, max(microbatches, 2 * workers - 1))
        return [operation for operation in whole if operation.microbatch < microbatches]

    return connected("zb-v", 2 * workers, microbatches, side_by_side(order, workers, microbatches, replicas))


def _v(worker: int, workers: int, microbatches: int) -> Order:
    """What a worker computes for at least 2 P - 1 microbatches."""
    down, up = worker, 2 * workers - 1 - worker
    numbers: dict[tuple[Kind, int], Iterator[int]] = {
        (kind, stage): count() for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT) for stage in (down, up)
    }
    order: Order = []

    def do(times: int, *steps: tuple[Kind, int]) -> None:
        order.extend(Operation(*step, next(numbers[step])) for _ in range(times) for step in steps)

    forward, back = (Kind.FORWARD, down), (Kind.FORWARD, up)
    far = workers - worker
    do(2 * far - 1, forward)
    do(worker, back, forward)
    do(far, back, (Kind.INPUT, up), (Kind.WEIGHT, up))
    begun = 2 * far - 1 + worker
    whole = [(Kind.INPUT, down), (Kind.WEIGHT, down), back, (Kind.INPUT, up), (Kind.WEIGHT, up)]
    do(microbatches - begun, forward, *whole)
    do(microbatches - workers - (microbatches - begun), *whole)
    do(worker, (Kind.INPUT, down), (Kind.INPUT, up))
    do(far, (Kind.INPUT, down), (Kind.WEIGHT, down))
    do(worker, (Kind.WEIGHT, up))
    do(worker, (Kind.WEIGHT, down))
    return order
