"""Distributed evaluation: each chunk is computed on one worker, and all results are combined in the order of chunks.

Chunks do not depend on the number of workers, so the result has the same bits on any number of workers, if each worker
has the same number of threads.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from paceline.comm.values import check
from paceline.data.keys import EVALUATION, seed_all, seed_of
from paceline.errors import InputError
from paceline.evaluation.chunks import Chunks
from paceline.evaluation.gathering import (
    Contributions,
    attempt,
    evaluating,
    gather_contributions,
    share_failure,
    sums_of,
)
from paceline.step.context import TrainingContext


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
    """Measure the model on a data set. All workers call this together, and fail together (``gathering``).

    Returns:
        the result, and the workers' notice (``comm.world``), which says whether the membership will change.

    Raises:
        InputError: the data or the contributions cannot be used, a weight of the model changed, or another worker
            failed.
    """
    world = context.world
    wanted = everywhere or world.rank == 0

    def compute() -> Contributions:
        chunks, sums = Chunks(context, data, what), sums_of(context)
        own = _computed(context, steps, measure, chunks, world.rank, world.size, what)
        return Contributions(own, chunks.facts(), sums)

    found, notice = gather_contributions(context, steps, what, compute, wanted)
    result, error = attempt(lambda: _combined(measure, found) if wanted else None)
    share_failure(context, error, what)
    return result, notice


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
    with evaluating(context):
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
            f"{what}: a value that the workers exchange cannot be sent: {error}. Give {what}(..., forward=...), a "
            f"function of (model, microbatch) that returns tensors, numbers and texts in tuples, lists and "
            f"dictionaries, such as the logits of an output."
        ) from None
