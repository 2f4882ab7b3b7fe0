"""Orders in which a batch is cut into microbatches, as pure functions of (samples, count).

Each returns at most ``count`` lists with all of the samples, none of them empty. To balance sums, the largest items go
first, each to the list with the least sum (Graham 1969, longest processing time first). Ties go to the list with the
fewest items, then to the first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from paceline.errors import InputError
from paceline.schedule.shares import even

MicrobatchOrder: TypeAlias = Callable[[list[int], int], Iterable[Sequence[int]]]
Values: TypeAlias = Callable[[int], Any] | Sequence[Any] | Mapping[int, Any]


def in_turn(samples: list[int], count: int) -> list[list[int]]:
    """Deal the samples of a batch to its microbatches in turn. Pass this function to ``start(microbatch_order=...)``.

    Examples:
        >>> in_turn([7, 3, 5, 1, 9], 2)
        [[7, 5, 9], [3, 1]]
    """
    return [samples[first::count] for first in range(count)]


def by_length(lengths: Values) -> MicrobatchOrder:
    """Return a microbatch order that puts samples of similar length together, in equal numbers.

    Args:
        lengths: length of each sample: a list or tensor of all samples, or a function of the sample number.

    Examples:
        >>> by_length([5, 2, 9, 1, 5])([0, 1, 2, 3, 4], 2)
        [[3, 1, 0], [4, 2]]
    """

    def order(samples: list[int], count: int) -> list[list[int]]:
        ordered = sorted(samples, key=lambda sample: _length(lengths, sample, "by_length"))
        return [ordered[part.start : part.stop] for part in even(len(ordered), count)]

    return order


def by_tokens(lengths: Values) -> MicrobatchOrder:
    """Return a microbatch order that gives all microbatches about the same sum of lengths, such as tokens.

    Examples:
        >>> by_tokens([5, 2, 9, 1, 5])([0, 1, 2, 3, 4], 2)
        [[1, 2], [0, 3, 4]]
    """

    def order(samples: list[int], count: int) -> list[list[int]]:
        return _balanced([([one], _length(lengths, one, "by_tokens")) for one in samples], count)

    return order


def by_class(labels: Values) -> MicrobatchOrder:
    """Return a microbatch order that puts all samples of a class into one microbatch.

    The microbatches have about the same number of samples. There are fewer of them if the batch has fewer classes.

    Args:
        labels: class of each sample: a list or tensor of all samples, or a function of the sample number.

    Examples:
        >>> by_class(["b", "a", "b", "c", "a"])([0, 1, 2, 3, 4], 2)
        [[0, 2, 3], [1, 4]]
    """

    def order(samples: list[int], count: int) -> list[list[int]]:
        classes: dict[Any, list[int]] = {}
        for sample in samples:
            classes.setdefault(_value(labels, sample, "by_class"), []).append(sample)
        return _balanced([(members, len(members)) for members in classes.values()], min(count, len(classes)))

    return order


def _balanced(items: list[tuple[list[int], float]], count: int) -> list[list[int]]:
    """Divide lists of samples with a weight each, so that the weights of all microbatches are about equal.

    A microbatch has its lists in their order in ``items``.
    """
    chosen: list[list[int]] = [[] for _ in range(count)]
    waiting = [(0.0, 0, microbatch) for microbatch in range(count)]
    for place in sorted(range(len(items)), key=lambda place: -items[place][1]):
        weight, lists, microbatch = waiting[0]
        heapq.heapreplace(waiting, (weight + items[place][1], lists + 1, microbatch))
        chosen[microbatch].append(place)
    return [[sample for place in sorted(places) for sample in items[place][0]] for places in chosen]


def _length(lengths: Values, sample: int, name: str) -> float:
    value = _value(lengths, sample, name)
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InputError(f"{name} got the length {value!r} for sample {sample}: a length is a number from 0 on.")
    return value


def _value(of: Values, sample: int, name: str) -> Any:
    """Return the value of a sample as a plain Python value, which can be compared and hashed."""
    try:
        value = of(sample) if callable(of) else of[sample]
    except LookupError:
        what = f"a {type(of).__name__}{f' of {len(of)}' if hasattr(of, '__len__') else ''}"
        raise InputError(f"{name} got {what}, without a value for sample {sample}: give one for each sample.") from None
    return value.item() if hasattr(value, "item") else value
