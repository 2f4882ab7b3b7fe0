"""Order of shards of known lengths: each is shuffled, and an epoch mixes them in proportion to their sizes.

::

    shard a    a0 a1 a2 a3 a4 a5     6 microbatches       step 0   a0 a1 b0 c0      batches of 4 microbatches
    shard b    b0 b1 b2              3                    step 1   a2 a3 b1 c1
    shard c    c0 c1 c2              3                    step 2   a4 a5 b2 c2

Each shard is shuffled and cut into microbatches of its own. Microbatch k of the n of a shard has the position (k + u)/n
in the epoch, with a random number u for each shard and epoch, and batches follow these positions. So each batch has
microbatches of a shard in proportion to its size, give or take one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.keys import ORDER, seed_of
from paceline.data.located.shards import firsts_of
from paceline.data.order import LARGEST_SHUFFLE, UNKNOWN
from paceline.schedule import feistel

Numbers = npt.NDArray[np.int64]


class Part(NamedTuple):
    """Microbatch of an epoch: the index of its shard in the order of their names, and its place in the shard."""

    shard: int
    place: int


class Shuffled:
    """Microbatches of each step.

    Args:
        lengths: number of samples of each shard, by name.
        size: largest number of samples in a microbatch.
        microbatches: number of microbatches in a batch.
    """

    known = UNKNOWN

    def __init__(self, lengths: Mapping[str, int], size: int, microbatches: int, seed: int) -> None:
        self._firsts = [*firsts_of(lengths).values()]
        self._lengths = [lengths[name] for name in sorted(lengths)]
        self._microbatches, self._seed = microbatches, seed
        self._counts: Numbers = -(-np.array(self._lengths) // size)  # microbatches
        self._samples, self._total = sum(self._lengths), int(self._counts.sum())
        self._steps = -(-self._total // microbatches)  # in an epoch
        self._offsets = lru_cache(maxsize=2)(self._offsets_of)
        self._shuffles = lru_cache(maxsize=2)(self._shuffles_of)

    def place_of(self, step: int) -> tuple[int, int]:
        return divmod(step, self._steps)

    def first_of(self, epoch: int) -> int:
        return epoch * self._steps

    def samples_before(self, step: int) -> int:
        epoch, index = self.place_of(step)
        before, _ = self._between(epoch, index * self._microbatches, index * self._microbatches)
        return epoch * self._samples + int(self._starts(before).sum())

    def parts_of(self, step: int) -> list[Part]:
        """Return the microbatches of a step."""
        epoch, index = self.place_of(step)
        start = index * self._microbatches
        return self._between(epoch, start, min(start + self._microbatches, self._total))[1]

    def _between(self, epoch: int, start: int, stop: int) -> tuple[Numbers, list[Part]]:
        """Return the number of microbatches of each shard before place ``start`` of an epoch, and those up to ``stop``.

        Of all microbatches only those near these places are sorted: before the position x are x times their number,
        give or take one for each shard.
        """
        shards, offsets = len(self._lengths), self._offsets(epoch)
        low = np.floor(self._counts * ((start - shards) / self._total) - offsets) - 1
        high = np.floor(self._counts * ((stop + shards) / self._total) - offsets) + 2
        before: Numbers = np.clip(low, 0, self._counts).astype(np.int64)
        widths = np.clip(high, 0, self._counts).astype(np.int64) - before
        shard = np.repeat(np.arange(shards), widths)
        index = np.arange(len(shard)) - np.repeat(widths.cumsum() - widths - before, widths)
        order = np.lexsort((shard, (index + offsets[shard]) / self._counts[shard]))
        first = start - int(before.sum())
        chosen = order[first : first + stop - start]
        parts = [Part(*one) for one in zip(shard[chosen].tolist(), index[chosen].tolist(), strict=True)]
        return before + np.bincount(shard[order[:first]], minlength=shards), parts

    def _offsets_of(self, epoch: int) -> npt.NDArray[np.float64]:
        generator = torch.Generator().manual_seed(seed_of(ORDER, self._seed, epoch))
        drawn = torch.rand(len(self._lengths), dtype=torch.float64, generator=generator)
        return np.asarray(drawn, np.float64)

    def _starts(self, index: Numbers) -> Numbers:
        """Return the number of samples before a microbatch of each shard. Their sizes differ by at most one."""
        short, longer = np.divmod(np.array(self._lengths), self._counts)
        starts: Numbers = index * short + np.minimum(index, longer)
        return starts

    def size_of(self, epoch: int, part: Part) -> int:
        """Return the number of samples of a microbatch of an epoch."""
        return len(self._slice(part))

    def _slice(self, part: Part) -> range:
        """Return the positions of a microbatch in the permutation of its shard."""
        short, longer = divmod(self._lengths[part.shard], int(self._counts[part.shard]))
        start = part.place * short + min(part.place, longer)
        return range(start, start + short + (part.place < longer))

    def numbers_of(self, epoch: int, part: Part) -> list[int]:
        """Return the sample numbers of a microbatch in the whole data set."""
        own, first = self._slice(part), self._firsts[part.shard]
        if self._samples > LARGEST_SHUFFLE:
            seed = seed_of(ORDER, self._seed, epoch, part.shard)
            found = feistel.permute(own.start, own.stop, self._lengths[part.shard], seed)
        else:
            found = self._shuffles(epoch)[part.shard][own.start : own.stop].tolist()
        return [first + sample for sample in found]

    def _shuffles_of(self, epoch: int) -> list[torch.Tensor]:
        """Return a permutation of each shard."""
        seeds = [seed_of(ORDER, self._seed, epoch, shard) for shard in range(len(self._lengths))]
        generators = (torch.Generator().manual_seed(seed) for seed in seeds)
        return [torch.randperm(length, generator=one) for length, one in zip(self._lengths, generators, strict=True)]
