"""Shares of workers and sizes of microbatches: pure functions of whole numbers."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

DEFAULT_MICROBATCHES = 8


def default_microbatches(batch: int) -> int:
    """Eight, or the largest power of two that leaves each microbatch a sample.

    Eight gives equal shares to 2, 4 and 8 workers, a share to each of up to eight, and microbatches large enough to be
    computed fast. The number must not depend on the workers: it affects the bits.
    """
    return min(DEFAULT_MICROBATCHES, 1 << (batch.bit_length() - 1))


@lru_cache(maxsize=64)
def even(total: int, parts: int) -> tuple[range, ...]:
    """Cut ``range(total)`` into contiguous parts whose lengths differ by one at most, the longer ones first.

    >>> even(10, 4)
    (range(0, 3), range(3, 6), range(6, 8), range(8, 10))
    """
    short, longer = divmod(total, parts)
    stops = list(accumulate([short + 1] * longer + [short] * (parts - longer)))
    return tuple(range(start, stop) for start, stop in zip([0, *stops], stops, strict=False))


def microbatches(samples: int, batch: int, parts: int) -> tuple[range, ...]:
    """Cut a batch of ``samples`` into microbatches, each a range of places in the batch.

    A full batch has ``parts`` of them. A short last batch (``samples < batch``) has fewer, of about the same size: tiny
    microbatches would be slow and would spoil batch statistics.
    """
    return even(samples, -(-samples * parts // batch))
