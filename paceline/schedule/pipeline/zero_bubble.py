"""Zero-bubble schedules (Qi et al. 2024, arXiv 2401.10241), which fill idle time with gradients for the weights.

Another stage waits for the gradient for the input (I), but not for the gradients for the weights (W)::

    ZB-H1    four stages, six microbatches, the memory of 1F1B
    0  F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    1     F0 F1 F2       I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
    2        F0 F1    I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
    3           F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

    ZB-V     two workers with two stages each, three microbatches; worker 0 has the first and the last stage
    0  F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2
    1       F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2

Let f be the time of each of the three operations for all layers of a worker, and V the number of microbatches. With one
stage for each of P workers the last worker cannot begin before (P - 1) f. In ZB-H1 it does not wait again if V >= P, so
with equal times no schedule of this kind is shorter. In ZB-V stages are half as large, and the last worker begins after
(P - 1) f / 2. It does not wait again if V >= 2 P - 1. Both keep no more activations than the first stage of 1F1B: those
of min(V, P) microbatches in all layers of a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from paceline.schedule.pipeline.operations import Kind, Operation, Schedule
from paceline.schedule.pipeline.transfers import Order, build_schedule, check_at_least, replicated_orders


def zero_bubble_h1(stages: int, microbatches: int, replicas: int = 1) -> Schedule:
    """Build ZB-H1: 1F1B in which stage s delays the gradients for the weights by s microbatches.

    Args:
        stages: number of stages, and workers of each pipeline.
        microbatches: number of microbatches of all pipelines.
        replicas: number of pipelines that share the microbatches.

    Raises:
        ConfigError: no stages, or fewer microbatches than replicas.
    """
    check_at_least(1, stages=stages)

    def order(stage: int, microbatches: int) -> Order:
        lead = stages - 1 - stage
        order = []
        for turn in range(microbatches + stages - 1):
            for kind, late in ((Kind.FORWARD, 0), (Kind.INPUT, lead), (Kind.WEIGHT, lead + stage)):
                if 0 <= turn - late < microbatches:
                    order.append(Operation(kind, stage, turn - late))
        return order

    return build_schedule("zb-h1", stages, microbatches, replicated_orders(order, stages, microbatches, replicas))


def zero_bubble_v(workers: int, microbatches: int, replicas: int = 1) -> Schedule:
    """Build ZB-V: worker w of P holds stages w and 2 P - 1 - w, so activations pass the workers there and back.

    Args:
        workers: number of workers of each pipeline.
        microbatches: number of microbatches of all pipelines.
        replicas: number of pipelines that share the microbatches.

    Raises:
        ConfigError: no workers, or fewer microbatches than replicas.
    """
    check_at_least(1, workers=workers)

    def order(worker: int, microbatches: int) -> Order:
        whole = _v(worker, workers, max(microbatches, 2 * workers - 1))
        return [operation for operation in whole if operation.microbatch < microbatches]

    return build_schedule("zb-v", 2 * workers, microbatches, replicated_orders(order, workers, microbatches, replicas))


def _v(worker: int, workers: int, microbatches: int) -> Order:
    """Return a worker's operations in ZB-V for at least 2 P - 1 microbatches."""
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
