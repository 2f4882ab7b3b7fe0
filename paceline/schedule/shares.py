"""Shares of workers and sizes of microbatches, as pure functions of integers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

DEFAULT_MICROBATCHES = 8


def default_microbatches(batch: int) -> int:
    """Return eight, or for batches of fewer samples the largest power of two that is not larger than the batch.

    Eight gives equal shares to 2, 4 and 8 workers, a share to each of up to eight workers, and microbatches large
    enough for fast computation. The number must not depend on the number of workers, because it affects the bits.
    """
    return min(DEFAULT_MICROBATCHES, 1 << (batch.bit_length() - 1))


@lru_cache(maxsize=64)
def even(total: int, parts: int) -> tuple[range, ...]:
    """Split ``range(total)`` into contiguous parts whose lengths differ by at most one, with longer parts first.

    >>> even(10, 4)
    (range(0, 3), range(3, 6), range(6, 8), range(8, 10))
    """
    short, longer = divmod(total, parts)
    stops = list(accumulate([short + 1] * longer + [short] * (parts - longer)))
    return tuple(range(start, stop) for start, stop in zip([0, *stops], stops, strict=False))


def microbatches(samples: int, batch: int, parts: int) -> tuple[range, ...]:
    """Split a batch of ``samples`` into microbatches, each a range of indices in the batch.

    A full batch has ``parts`` microbatches. A short last batch (``samples < batch``) has fewer microbatches of about
    the same size, because tiny microbatches would be slow and would distort batch statistics.
    """
    return even(samples, -(-samples * parts // batch))


def by_size(sizes: Sequence[int], parts: int) -> tuple[range, ...]:
    """Split ``range(len(sizes))`` into contiguous parts of about the same total size, none of them empty.

    >>> by_size([10, 30, 10, 10, 1], 3)
    (range(0, 1), range(1, 2), range(2, 5))
    """
    ends = list(accumulate(sizes))
    stops = [0]
    for part in range(1, parts):
        wanted = ends[-1] * part / parts
        choices = range(stops[-1] + 1, len(sizes) - parts + part + 1)
        stops.append(min(choices, key=lambda stop: abs(ends[stop - 1] - wanted)))
    return tuple(range(start, stop) for start, stop in pairwise([*stops, len(sizes)]))


def runs(share: Sequence[int]) -> list[range]:
    """Return the contiguous parts of a share in ascending order.

    >>> runs((0, 1, 2, 5, 7, 8))
    [range(0, 3), range(5, 6), range(7, 9)]
    """
    if isinstance(share, range):
        return [share] if share else []
    starts = [place for place, one in enumerate(share) if place == 0 or share[place - 1] != one - 1]
    return [range(share[start], share[stop - 1] + 1) for start, stop in pairwise([*starts, len(share)])]
