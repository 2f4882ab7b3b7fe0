"""Computation of a function for each of several items, on all workers, as for the rollouts of reinforcement learning.

::

    items      0 1 2 3 4 5 6 7
    worker 0   0   2 ✗                 lost, with its result for item 0
    worker 1     1   3   5   7 │ 0 4   the others keep their results, and divide the rest
    worker 2                   │ 2 6   joins

The random numbers of an item are keyed by the call and the item, so neither the worker that computes it nor the order
matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.checkpoint import encoding
from paceline.comm.collectives.agreement import compare
from paceline.comm.values import decode, encode
from paceline.data.keys import MAP, seed_all, seed_of
from paceline.data.streams.reader import digest
from paceline.errors import InputError
from paceline.evaluation.gathering import Contributions, evaluating, gather_contributions, sums_of
from paceline.step.context import TrainingContext
from paceline.system.user_code import in_user_call

_MOST_SHOWN = 80


def map_items(
    context: TrainingContext,
    key: Sequence[int],
    steps: int,
    function: Callable[[int, Any], Any],
    items: Sequence[Any],
    found: dict[int, Any],
) -> tuple[list[Any], int]:
    """Return the results for all items, and the workers' notice. All workers call this together, and fail together.

    Args:
        key: key of the call for random numbers.
        function: function of the index of an item and the item.
        found: results of this worker by index. The caller keeps them if it repeats the call after a loss.

    Raises:
        InputError: a result cannot be sent, a weight of the model changed, or another worker failed.
        DisagreementError: the workers have other items.
    """
    world = context.world
    known = world.gather((_facts(items), sorted(found)), "map")
    compare([facts for facts, _ in known], "map: ")
    done = {index for _, indices in known for index in indices}
    left = [index for index in range(len(items)) if index not in done]

    def compute() -> Contributions:
        sums = sums_of(context)
        with evaluating(context):
            for index in left[world.rank :: world.size]:
                seed_all(seed_of(MAP, context.settings.seed, *key, index))
                found[index] = _computed(context, function, index, items[index])
        return Contributions(sorted(found.items()), {}, sums)

    gathered, notice = gather_contributions(context, steps, "map", compute)
    results = dict(gathered)
    return [results[index] for index in range(len(items))], notice


def _computed(context: TrainingContext, function: Callable[[int, Any], Any], index: int, item: Any) -> Any:
    """Return the result for an item as other workers receive it: a copy on the host."""
    compute = context.compute
    try:
        with compute.precision(), compute.keeping_weights():
            result = function(index, item)
    except Exception as error:
        in_user_call(error, f"This was item {index} of session.map: {_shown(item)}.")
        raise
    compute.buffers.put_all_back()
    try:
        encoding.encode(result, {}, f"the result for item {index}")
        return decode(encode(result))
    except (encoding.EncodingError, TypeError, RecursionError) as error:
        raise InputError(
            f"map: what the function returned for item {index} ({_shown(item)}) cannot be sent: {error}. Return "
            f"tensors, numbers and texts in tuples, lists and dictionaries; make tensors of arrays by torch.as_tensor."
        ) from None


def _shown(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _facts(items: Sequence[Any]) -> dict[str, object]:
    return {"items": f"{len(items)} ({digest(list(items))[:8]})"}
