"""Gathering of contributions: each worker computes some of a sequence, and all workers get all of them.

If some workers fail, they raise their own error after the other workers have learned of it, and the other workers raise
an error that quotes it. A script that catches the error finds all workers at the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from paceline.comm.collectives.agreement import compare
from paceline.data.keys import preserve_generators
from paceline.data.nested import tensors_in
from paceline.errors import DisagreementError, InputError, WorkerLost
from paceline.step.context import TrainingContext
from paceline.step.replicas import difference, digests, frozen
from paceline.system import fault_points

_PARCEL_BYTES = 64 << 20  # Maximum size of a message. A larger contribution is a message of its own.

_T = TypeVar("_T")


class Contributions(NamedTuple):
    """Contributions of a worker by their index, values on which all workers must agree, and sums over its state."""

    found: list[tuple[int, Any]]
    facts: dict[str, object]
    sums: dict[str, Any]


def gather_contributions(
    context: TrainingContext, steps: int, what: str, compute: Callable[[], Contributions], wanted: bool = True
) -> tuple[list[tuple[int, Any]], int]:
    """Compute this worker's contributions, and gather those of all workers. All workers call this together.

    Args:
        wanted: whether this worker needs the contributions of others.

    Returns:
        the contributions, and the workers' notice (``comm.world``) of whether the membership is to change.

    Raises:
        DisagreementError: the facts or the states of the workers differ.
    """
    world = context.world
    computed, error = attempt(compute)
    fault_points.reach("in evaluate", steps)
    own, facts, sums = computed or Contributions([], {}, {})
    parcels = _parcels(own)
    said = world.gather((words(error), parcels[0], len(parcels), facts, world.notice(), sums), what)
    raise_first(error, [failed for failed, *_ in said], what)
    if differs := difference([sums for *_, sums in said]):
        raise DisagreementError(differs)
    compare([facts for _, _, _, facts, *_ in said], f"{what}: ")
    found = [one for _, parcel, *_ in said for one in parcel]
    for place in range(1, max(count for _, _, count, *_ in said)):
        more = world.gather(parcels[place] if place < len(parcels) else [], what)
        found += [one for parcel in more for one in parcel] if wanted else []
    return found, max(notice for *_, notice, _ in said)


def attempt(act: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return a function's result, or the error that it raised. The other workers learn of the error first."""
    try:
        return act(), None
    except WorkerLost:
        raise
    except Exception as error:  # noqa: BLE001 - raised again once the other workers know
        return None, error


def share_failure(context: TrainingContext, error: Exception | None, what: str) -> None:
    """Raise this worker's error, or else an error that quotes another worker's. All workers call this together."""
    raise_first(error, context.world.gather(words(error), what), what)


def raise_first(error: Exception | None, failures: Sequence[str], what: str) -> None:
    """Raise this worker's error, or else an error that quotes the first failure of another worker."""
    if error is not None:
        raise error
    for rank, failed in enumerate(failures):
        if failed:
            raise InputError(f"session.{what} failed on rank {rank}: {failed}")


def words(error: Exception | None) -> str:
    """Return the error and its notes, such as which call of the user's code raised it."""
    return "" if error is None else " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def sums_of(context: TrainingContext) -> dict[str, Any]:
    """Return the values of their states that workers compare: with ``exact`` a sum over the bits of each tensor."""
    return digests(context) if context.settings.exact and context.world.size > 1 else frozen(context)


@contextmanager
def evaluating(context: TrainingContext) -> Iterator[None]:
    """Return a context in which the model is in evaluation mode, without gradients. It restores modes and buffers.

    The global generators are restored, too.
    """
    model = context.compute.model
    training = {module: module.training for module in model.modules()}
    model.eval()
    context.compute.buffers.take_all()
    try:
        with preserve_generators(), torch.no_grad(), context.update.evaluating():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


def _parcels(found: list[tuple[int, Any]]) -> list[list[tuple[int, Any]]]:
    """Split a worker's contributions into messages."""
    parcels: list[list[tuple[int, Any]]] = [[]]
    room = _PARCEL_BYTES
    for one in found:
        size = sum(tensor.nbytes for tensor in tensors_in(one[1]))
        if parcels[-1] and size > room:
            parcels.append([])
            room = _PARCEL_BYTES
        parcels[-1].append(one)
        room -= size
    return parcels
