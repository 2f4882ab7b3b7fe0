"""Completion of schedules: adds sends, receives, reductions and updates to the order in which workers compute.

::

    worker 0, holds stage 0     F0          F1                      B0          B1          U0
    becomes                     F0 s0>      F1 s1>      r0<         B0    r1<   B1          U0

A value is sent right after the operation that makes it, and received right before the operation that needs it. Values
arrive in the order of sending. If two values are needed in the reverse order, the value sent first is received early.
This adds no waiting, because the value that is needed next arrives even later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.errors import ConfigError
from paceline.schedule.pipeline.operations import Kind, Operation, Schedule
from paceline.schedule.shares import even

Order = list[Operation]  # operations of a worker, in order

GRADIENT = (Kind.BACKWARD, Kind.INPUT)  # operations that produce the gradient for the input of their stage


def check_at_least(least: int, **values: int) -> None:
    """Check that arguments of a schedule are integers of at least ``least``."""
    for name, value in values.items():
        if not isinstance(value, int):
            raise ConfigError(f"a schedule needs a whole number of {name}, not {value!r}")
        if value < least:
            raise ConfigError(
                f"a schedule needs {name} of at least {least}, not {value}: set {name} to {least} or more"
            )


def receive_before(operation: Operation, stages: int) -> Operation | None:
    """Return the receive for an operation if its input comes from another worker. None if it needs no other stage."""
    kind, stage, microbatch = operation[:3]
    if kind == Kind.FORWARD and stage > 0:
        return Operation(Kind.RECEIVE, stage, microbatch, peer=stage - 1)
    if kind in GRADIENT and stage < stages - 1:
        return Operation(Kind.RECEIVE, stage, microbatch, peer=stage + 1)
    return None


def send_after(operation: Operation, stages: int) -> Operation | None:
    """Return the send for an operation if its result goes to another worker. None if no other stage needs it."""
    kind, stage, microbatch = operation[:3]
    if kind == Kind.FORWARD and stage < stages - 1:
        return Operation(Kind.SEND, stage, microbatch, peer=stage + 1)
    if kind in GRADIENT and stage > 0:
        return Operation(Kind.SEND, stage, microbatch, peer=stage - 1)
    return None


def with_transfers(order: Sequence[Operation], stages: int) -> Order:
    """Return the operations of a worker with a single stage, with receives and sends added."""
    around = ((receive_before(one, stages), one, send_after(one, stages)) for one in order)
    return [operation for group in around for operation in group if operation is not None]


def replicated_orders(
    order: Callable[[int, int], Order], workers: int, microbatches: int, replicas: int
) -> list[Order]:
    """Return the orders of several equal pipelines, each with a share of the microbatches.

    Args:
        order: returns the operations of a worker, given its index in the pipeline and the number of microbatches.

    Returns:
        the orders of all workers. Workers with the same index in their pipelines are adjacent.

    Raises:
        ConfigError: no replicas, or fewer microbatches than replicas.
    """
    check_at_least(1, replicas=replicas)
    check_at_least(replicas, microbatches=microbatches)
    shares = even(microbatches, replicas)
    return [
        [operation._replace(microbatch=share.start + operation.microbatch) for operation in order(place, len(share))]
        for place in range(workers)
        for share in shares
    ]


class _Position(NamedTuple):
    """Position of an operation in the orders."""

    worker: int
    at: int


def build_schedule(name: str, stages: int, microbatches: int, orders: Sequence[Order]) -> Schedule:
    """Build a synchronous schedule from the order of each worker, with an update of each stage at the end.

    Args:
        orders: orders of all workers, which contain each stage and microbatch once.
    """
    receives, sends = _transfers(stages, orders)
    holders = [{one.stage for one in order} for order in orders]
    workers = []
    for worker, order in enumerate(orders):
        operations: Order = []
        for index, operation in enumerate(order):
            operations += receives.get(_Position(worker, index), [])
            operations.append(operation)
            operations += sends.get(_Position(worker, index), [])
        held = sorted(holders[worker])
        operations += [Operation(Kind.REDUCE, one) for one in held if sum(one in other for other in holders) > 1]
        operations += [Operation(Kind.UPDATE, one, version=1) for one in held]
        workers.append(tuple(operations))
    return Schedule(name, stages, microbatches, tuple(workers))


def _transfers(stages: int, orders: Sequence[Order]) -> tuple[dict[_Position, Order], dict[_Position, Order]]:
    """Return the receives before each operation and the sends after each operation."""
    needed = _needed(stages, orders)
    receives: dict[_Position, Order] = {}
    sends: dict[_Position, Order] = {}
    for worker, order in enumerate(orders):
        # For each other worker: the operation before which it receives the values sent after this operation.
        first: dict[int, int] = {}
        for index in range(len(order) - 1, -1, -1):
            if (one := send_after(order[index], stages)) is None:
                continue
            place = needed[one.peer, one.stage, one.microbatch]
            if place.worker == worker:
                continue
            sends[_Position(worker, index)] = [one]
            first[place.worker] = min(place.at, first.get(place.worker, place.at))
            before = receives.setdefault(_Position(place.worker, first[place.worker]), [])
            before.insert(0, Operation(Kind.RECEIVE, one.peer, one.microbatch, peer=one.stage))
    return receives, sends


def _needed(stages: int, orders: Sequence[Order]) -> dict[tuple[int, int, int], _Position]:
    """Return the position of the operation that needs a value, by (receiving stage, sending stage, microbatch)."""
    needed = {}
    for worker, order in enumerate(orders):
        for index, operation in enumerate(order):
            if (value := receive_before(operation, stages)) is not None:
                needed[value.stage, value.peer, value.microbatch] = _Position(worker, index)
    return needed
