"""Distributed evaluation: each chunk is computed on one worker, and all results are combined in the order of chunks.

Chunks do not depend on the number of workers, so the result has the same bits on any number of workers, if each worker
has the same number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from paceline.comm.collectives.agreement import compare
from paceline.comm.values import check
from paceline.data.keys import EVALUATION, preserve_generators, seed_all, seed_of
from paceline.data.nested import tensors_in
from paceline.errors import DisagreementError, InputError, WorkerLost
from paceline.evaluation.chunks import Chunks
from paceline.step.context import TrainingContext
from paceline.step.replicas import difference, digests, frozen
from paceline.system import fault_points

_PARCEL_BYTES = 64 << 20
"""Maximum size of a message. A larger contribution is a message of its own."""

_T = TypeVar("_T")


class Measure(Protocol):
    """Quantity that is computed from the chunks of a data set."""

    def compute(self, model: nn.Module, data: Any, samples: int) -> Any:
        """Return the contribution of some samples: values that can be sent to other workers."""

    def combine(self, contributions: list[Any]) -> Any:
        """Combine the contributions of all chunks, given in the order of chunks."""


def evaluate(
    context: TrainingContext,
    steps: int,
    measure: Measure,
    data: Any,
    what: str = "evaluate",
    *,
    everywhere: bool = True,  # whether all workers get the result. If False, only rank 0 does.
) -> tuple[Any, int]:
    """Measure the model on a data set. All workers call this together.

    If some workers fail, they raise their own error after the other workers have learned of it, and the other workers
    raise an error that quotes it. A script that catches the error finds all workers at the same point.

    Returns:
        the result, and the workers' notice (``comm.world``) of whether the membership is to change.

    Raises:
        InputError: the data or the contributions cannot be used, a weight of the model changed, or another worker
            failed.
    """
    world = context.world

    def compute() -> tuple[list[tuple[int, Any]], dict[str, object], dict[str, Any]]:
        chunks = Chunks(context, data, what)
        sums = digests(context) if context.settings.exact and world.size > 1 else frozen(context)
        own = _computed(context, steps, measure, chunks, world.rank, world.size, what)
        return own, chunks.facts(), sums

    computed, error = _try(compute)
    fault_points.reach("in evaluate", steps)
    own, facts, sums = computed or ([], {}, {})
    parcels = _parcels(own)
    said = world.gather((_words(error), parcels[0], len(parcels), facts, world.notice(), sums), what)
    _raise_first(error, [failed for failed, *_ in said], what)
    differs = difference([sums for *_, sums in said])
    if differs:
        raise DisagreementError(differs)
    compare([facts for _, _, _, facts, *_ in said], f"{what}: ")
    found = [one for _, parcel, *_ in said for one in parcel]
    wanted = everywhere or world.rank == 0
    for place in range(1, max(count for _, _, count, *_ in said)):
        more = world.gather(parcels[place] if place < len(parcels) else [], what)
        found += [one for parcel in more for one in parcel] if wanted else []
    result, error = _try(lambda: _combined(measure, found) if wanted else None)
    _raise_first(error, world.gather(_words(error), what), what)
    return result, max(notice for *_, notice, _ in said)


def _try(act: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return a function's result, or the error that it raised. The other workers learn of the error first."""
    try:
        return act(), None
    except WorkerLost:
        raise
    except Exception as error:  # noqa: BLE001 - raised again once the other workers know
        return None, error


def _words(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _raise_first(error: Exception | None, failures: Sequence[str], what: str) -> None:
    """Raise this worker's error, or else an error that quotes the first failure of another worker."""
    if error is not None:
        raise error
    for rank, failed in enumerate(failures):
        if failed:
            raise InputError(f"session.{what} failed on rank {rank}: {failed}")


def evaluate_alone(context: TrainingContext, steps: int, measure: Measure, data: Any, what: str) -> Any:
    """Measure the model on this worker alone, because the other workers have already done so."""
    return _combined(measure, _computed(context, steps, measure, Chunks(context, data, what), 0, 1, what))


def _combined(measure: Measure, found: list[tuple[int, Any]]) -> Any:
    return measure.combine([value for _, value in sorted(found, key=lambda one: one[0])])


def _computed(
    context: TrainingContext, steps: int, measure: Measure, chunks: Chunks, rank: int, size: int, what: str
) -> list[tuple[int, Any]]:
    """Return the contribution of each chunk of this worker, with the chunk's index."""
    compute, found = context.compute, []
    with _evaluating(context), preserve_generators():
        for number, samples, data in chunks.of(rank, size):
            seed_all(seed_of(EVALUATION, context.settings.seed, steps, number))
            with compute.precision(), compute.keeping_weights():
                contribution = measure.compute(compute.model, data, samples)
            compute.buffers.put_all_back()
            _check_sendable(contribution, what)
            found.append((number, contribution))
    return found


def _check_sendable(contribution: Any, what: str) -> None:
    try:
        check(contribution)
    except TypeError as error:
        raise InputError(
            f"{what}: not all that the workers give each other can be sent: {error}. Give {what}(..., forward=...), a "
            f"function of (model, microbatch) that returns tensors, numbers and texts in tuples, lists and "
            f"dictionaries, such as the logits of an output."
        ) from None


@contextmanager
def _evaluating(context: TrainingContext) -> Iterator[None]:
    model = context.compute.model
    training = {module: module.training for module in model.modules()}
    model.eval()
    context.compute.buffers.take_all()
    try:
        with torch.no_grad(), context.update.averages.in_place(), context.update.evaluating():
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
