"""Computation of a function for each of several items, on all workers: rollouts, or a pass over located shards.

::

    items      0 1 2 3 4 5 6 7
    worker 0   0   2 ✗                 lost, with its result for item 0
    worker 1     1   3   5   7 │ 0 4   the others keep their results, and divide the rest
    worker 2                   │ 2 6   joins

The random numbers of an item are keyed by the call and the item, so neither the worker that computes it nor the order
matters. A shard is computed by a worker that has it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.checkpoint import encoding
from paceline.comm.collectives.agreement import compare
from paceline.comm.values import decode, encode
from paceline.data.keys import MAP, seed_all, seed_of
from paceline.data.located.agreement import Holding, agree
from paceline.data.located.shards import Located, ShardFacts
from paceline.data.source import check_shards
from paceline.data.streams.reader import digest
from paceline.errors import InputError
from paceline.evaluation.gathering import (
    Contributions,
    attempt,
    evaluating,
    gather_contributions,
    raise_first,
    sums_of,
    words,
)
from paceline.schedule.placement import spread
from paceline.step.context import TrainingContext
from paceline.system.user_code import in_user_call

_MOST_SHOWN = 80


@dataclass
class Known:
    """Results of this worker by index, and the shards of all workers, which it keeps if the call is repeated."""

    results: dict[int, Any] = field(default_factory=dict)
    shards: Holding = field(default_factory=lambda: Holding({}, {}, {}, {}))


def map_items(
    context: TrainingContext,
    key: Sequence[int],
    steps: int,
    function: Callable[[str, Any], Any],
    items: Sequence[Any] | Located,
    known: Known,
) -> tuple[list[Any], int]:
    """Return the results for all items, and the workers' notice. All workers call this together, and fail together.

    Args:
        key: key of the call for random numbers.
        function: function of the name of an item and the item.
        items: items, the same on all workers, or shards, which follow the order of their names.

    Raises:
        InputError: a result cannot be sent, a weight of the model changed, a shard is lost, or another worker failed.
        DisagreementError: the workers have different items.
    """
    own = _own(context, items, known)

    def compute() -> Contributions:
        sums = sums_of(context)
        with evaluating(context):
            for index, (name, item) in own.items():
                seed_all(seed_of(MAP, context.settings.seed, *key, index))
                known.results[index] = _computed(context, function, name, item)
        return Contributions(sorted(known.results.items()), {}, sums)

    gathered, notice = gather_contributions(context, steps, "map", compute)
    return [result for _, result in sorted(gathered, key=lambda one: one[0])], notice


def _own(context: TrainingContext, items: Sequence[Any] | Located, known: Known) -> dict[int, tuple[str, Any]]:
    """Return the items that this worker computes, by index, with their names. All without a result are divided."""
    world, size = context.world, context.world.size
    shards, error = attempt(lambda: _shard_facts(context, items))
    given = platform.node(), shards or {}, known.shards
    said = world.gather((words(error), _facts(items), sorted(known.results), given), "map")
    raise_first(error, [failed for failed, *_ in said], "map")
    compare([facts for _, facts, *_ in said], "map: ")
    done = {index for _, _, indices, _ in said for index in indices}
    if isinstance(items, Located):
        known.shards, ranks = agree([one for *_, one in said])
        names = [*known.shards.shards]
        left = [index for index in range(len(names)) if index not in done]
        lengths = [known.shards.shards[names[index]].length or 1 for index in left]
        share = spread(lengths, [ranks[names[index]] for index in left], size)[world.rank]
        return {left[place]: (f"shard {(name := names[left[place]])!r}", items.shards[name]) for place in share}
    left = [index for index in range(len(items)) if index not in done]
    return {index: (f"item {index}", items[index]) for index in left[world.rank :: size]}


def _shard_facts(context: TrainingContext, items: Sequence[Any] | Located) -> dict[str, ShardFacts]:
    if not isinstance(items, Located):
        return {}
    check_shards(items)
    return items.facts(context.settings.seed, exact=bool(context.settings.exact))


def _computed(context: TrainingContext, function: Callable[[str, Any], Any], name: str, item: Any) -> Any:
    """Return the result for an item as other workers receive it: a copy on the host."""
    compute = context.compute
    try:
        with compute.precision(), compute.keeping_weights():
            result = function(name, item)
    except Exception as error:
        in_user_call(error, f"This was {name} of session.map: {_shown(item)}.")
        raise
    compute.buffers.put_all_back()
    try:
        encoding.encode(result, {}, f"the result for {name}")
        return decode(encode(result))
    except (encoding.EncodingError, TypeError, RecursionError) as error:
        raise InputError(
            f"map: the result of the function for {name} ({_shown(item)}) cannot be sent: {error}. Return "
            f"tensors, numbers and texts in tuples, lists and dictionaries; make tensors of arrays by torch.as_tensor."
        ) from None


def _shown(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _facts(items: Sequence[Any] | Located) -> dict[str, object]:
    if isinstance(items, Located):
        return {"items": "shards of Located"}
    return {"items": f"{len(items)} ({digest(list(items))[:8]})"}
