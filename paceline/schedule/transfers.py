"""From the order in which workers compute to a whole schedule: what they send, receive, reduce and update.

::

    worker 0, holds stage 0     F0          F1                      B0          B1          U0
    becomes                     F0 s0>      F1 s1>      r0<         B0    r1<   B1          U0

A value is sent right after the operation that made it, and received right before the one that needs it. Between two
workers values arrive in the order in which they were sent; where they are needed in another order, a worker receives
what was sent first earlier. That never makes it wait longer: what it is about to need comes later still.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.errors import ConfigError
from paceline.schedule.operations import Kind, Operation, Schedule
from paceline.schedule.shares import even

Order = list[Operation]
"""What one worker computes, in order."""

GRADIENT = (Kind.BACKWARD, Kind.INPUT)
"""The operations that make the gradient for the input of their stage."""


def check_at_least(least: int, **values: int) -> None:
    """Check what a schedule is asked for.

    Raises:
        ConfigError: a value is smaller, or no whole number.
    """
    for name, value in values.items():
        if not isinstance(value, int):
            raise ConfigError(f"a schedule needs a whole number of {name}, not {value!r}")
        if value < least:
            raise ConfigError(
                f"a schedule needs {name} of at least {least}, not {value}: set {name} to {least} or more"
            )


def receive_before(operation: Operation, stages: int) -> Operation | None:
    """What a stage must have received before an operation, if the stage next to it is another worker's."""
    kind, stage, microbatch = operation[:3]
    if kind == Kind.FORWARD and stage > 0:
        return Operation(Kind.RECEIVE, stage, microbatch, peer=stage - 1)
    if kind in GRADIENT and stage < stages - 1:
        return Operation(Kind.RECEIVE, stage, microbatch, peer=stage + 1)
    return None


def send_after(operation: Operation, stages: int) -> Operation | None:
    """What a stage sends after an operation, if the stage next to it is another worker's."""
    kind, stage, microbatch = operation[:3]
    if kind == Kind.FORWARD and stage < stages - 1:
        return Operation(Kind.SEND, stage, microbatch, peer=stage + 1)
    if kind in GRADIENT and stage > 0:
        return Operation(Kind.SEND, stage, microbatch, peer=stage - 1)
    return None


def with_transfers(order: Sequence[Operation], stages: int) -> Order:
    """Each operation with what it receives and sends, of a worker that holds a single stage."""
    around = ((receive_before(one, stages), one, send_after(one, stages)) for one in order)
    return [operation for group in around for operation in group if operation is not None]


def replicated_orders(
    order: Callable[[int, int], Order], workers: int, microbatches: int, replicas: int
) -> list[Order]:
    """Several equal pipelines, each with a share of the microbatches.

    Args:
        order: what the worker at a place of a pipeline computes for so many microbatches.
        workers: of one pipeline.
        microbatches: of all pipelines.
        replicas: how many pipelines.

    Returns:
        the orders of all workers, those at the same place next to each other.

    Raises:
        ConfigError: no such pipeline.
    """
    check_at_least(1, replicas=replicas)
    check_at_least(replicas, microbatches=microbatches)
    shares = even(microbatches, replicas)
    return [
        [operation._replace(microbatch=share.start + operation.microbatch) for operation in order(place, len(share))]
        for place in range(workers)
        for share in shares
    ]


class _Place(NamedTuple):
    """An operation in the orders."""

    worker: int
    at: int


def build_schedule(name: str, stages: int, microbatches: int, orders: Sequence[Order]) -> Schedule:
    """A synchronous schedule from what each worker computes: one update at the end.

    Args:
        name: of the algorithm.
        stages: into how many parts the model is cut.
        microbatches: how many go through the pipeline.
        orders: of each worker; each stage and microbatch once.
    """
    receives, sends = _transfers(stages, orders)
    holders = [{one.stage for one in order} for order in orders]
    workers = []
    for worker, order in enumerate(orders):
        operations: Order = []
        for index, operation in enumerate(order):
            operations += receives.get(_Place(worker, index), [])
            operations.append(operation)
            operations += sends.get(_Place(worker, index), [])
        held = sorted(holders[worker])
        operations += [Operation(Kind.REDUCE, one) for one in held if sum(one in other for other in holders) > 1]
        operations += [Operation(Kind.UPDATE, one, version=1) for one in held]
        workers.append(tuple(operations))
    return Schedule(name, stages, microbatches, tuple(workers))


def _transfers(stages: int, orders: Sequence[Order]) -> tuple[dict[_Place, Order], dict[_Place, Order]]:
    """What is received before, and sent after, each operation."""
    needed = _needed(stages, orders)
    receives: dict[_Place, Order] = {}
    sends: dict[_Place, Order] = {}
    for worker, order in enumerate(orders):
        # Of each other worker: before which of its operations it receives what was sent after the one looked at.
        first: dict[int, int] = {}
        for index in range(len(order) - 1, -1, -1):
            one = send_after(order[index], stages)
            if one is None:
                continue
            place = needed[one.peer, one.stage, one.microbatch]
            if place.worker == worker:
                continue
            sends[_Place(worker, index)] = [one]
            first[place.worker] = min(place.at, first.get(place.worker, place.at))
            before = receives.setdefault(_Place(place.worker, first[place.worker]), [])
            before.insert(0, Operation(Kind.RECEIVE, one.peer, one.microbatch, peer=one.stage))
    return receives, sends


def _needed(stages: int, orders: Sequence[Order]) -> dict[tuple[int, int, int], _Place]:
    """Which operation needs a value that a stage gets from another one for a microbatch."""
    needed = {}
    for worker, order in enumerate(orders):
        for index, operation in enumerate(order):
            value = receive_before(operation, stages)
            if value is not None:
                needed[value.stage, value.peer, value.microbatch] = _Place(worker, index)
    return needed
