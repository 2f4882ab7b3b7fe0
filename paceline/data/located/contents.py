"""Comparison of the samples of shards that several workers have.

::

    worker 0   shard a: samples 9 4 7 1 0 3 ..., 800 in time ┐ counts and     ┐ digests of    ┐ digests of
    worker 1   shard a: samples 9 4 7 1 0 3 ..., 500 in time ┘ their digests  ┘ the first 500 ┘ each: sample 7 differs

The workers read the samples of a shard in the same pseudorandom order as long as there is time. Most shards take one
exchange: short ones are read to the end. Only digests are sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.comm.world import World
from paceline.data.comparison import bits_of, roundings_of
from paceline.data.keys import ORDER, SAMPLE, preserve_generators, seed_all, seed_of
from paceline.data.located.shards import Located
from paceline.schedule import feistel

_SECONDS, _SECONDS_NEAR, _SECONDS_JOINING = 2.0, 1.0, 0.25
"""Time for reading at a start, if all that have a shard are on one machine, and while the others wait for a joiner."""
_CHUNK = 1024  # number of samples of the order that are looked up at once
_READ_AGAIN = 64
"""Largest number of samples of a shard that are read again because their digests differ."""
_Reading = tuple[int, int, list[tuple[str, ...]]] | None
"""A sample, its digest, and its roundings if these count. None if the sample is not the same again."""


class Difference(NamedTuple):
    """Sample of a shard that differs on two ranks."""

    shard: str
    left: int
    right: int
    sample: int


class Contents:
    """Digests of the samples that this worker has read of the shards that others have, too.

    Args:
        exact: whether samples that differ in rounding errors alone are different.
    """

    def __init__(self, data: Located, seed: int, *, exact: bool) -> None:
        self._data, self._seed, self._exact = data, seed, exact
        self._read = dict[str, npt.NDArray[np.uint64]]()  # digests of samples, in the order of each shard
        self._compared = set[str]()  # shards in which all workers that had them found no difference

    def compare(
        self, world: World, ranks: Mapping[str, Sequence[int]], doing: str, joined: Collection[int] = ()
    ) -> list[Difference]:
        """Compare shards with those of other workers. All workers call this together, with the same arguments.

        Args:
            ranks: ranks that have each shard, in ascending order.
            joined: ranks that join. They are compared with the others, and have little time to read.

        Returns:
            the first difference of each worker from the first one that has the shard.
        """
        held = {name: sorted(every, key=lambda rank: rank in joined) for name, every in ranks.items() if len(every) > 1}
        if not held:
            return []
        machine = {rank: place for place, host in enumerate(world.hosts) for rank in host}
        apart = any(len({machine[rank] for rank in every}) > 1 for every in held.values())
        own = [name for name in held if world.rank in held[name]]
        with preserve_generators():
            self._read_on(own, _SECONDS_JOINING if joined else _SECONDS if apart else _SECONDS_NEAR)
            found = self._differences(world, held, own, doing)
        self._compared.update(set(own).difference(one.shard for one in found))
        return found

    def _read_on(self, names: Sequence[str], seconds: float) -> None:
        """Read the shards that have not been read, in shares of the time by their lengths."""
        new = [name for name in names if name not in self._read]
        left, end = sum(len(self._data.shards[name]) for name in new), perf_counter() + seconds
        for name in new:
            length, found, now = len(self._data.shards[name]), list[int](), perf_counter()
            stop = now + (end - now) * length / left
            with suppress(Exception):  # the microbatch of the sample raises it again, with its step
                while len(found) < length and perf_counter() < stop:
                    for sample in self._order(name, len(found), min(len(found) + _CHUNK, length)):
                        found.append(self._digest(name, sample)[0])
                        if perf_counter() > stop:
                            break
            self._read[name], left = np.array(found, np.uint64), left - length

    def _order(self, name: str, start: int, stop: int) -> list[int]:
        return feistel.permute(start, stop, len(self._data.shards[name]), seed_of(ORDER, self._seed))

    def _digest(self, name: str, sample: int) -> tuple[int, Any]:
        """Read a sample with random numbers of its own, and return its digest and the sample."""
        seed_all(seed_of(SAMPLE, self._seed, 0, sample))
        found = self._data.shards[name][sample]
        return int(bits_of(found)[:16], 16), found

    def _differences(
        self, world: World, held: Mapping[str, Sequence[int]], own: Collection[str], doing: str
    ) -> list[Difference]:
        mine = {name: (len(self._read[name]), self._prefix(name), name in self._compared) for name in own}
        everyone = world.gather(mine, doing)
        read = {name: [everyone[rank][name] for rank in every] for name, every in held.items()}
        least = {name: min(count for count, *_ in every) for name, every in read.items()}
        new = [name for name, every in read.items() if not all(compared for *_, compared in every)]
        left = [name for name in new if len({one[:2] for one in read[name]}) > 1]
        if not left:
            return []
        prefixes = world.gather({name: self._prefix(name, least[name]) for name in left if name in own}, doing)
        left = [name for name in left if len({prefixes[rank][name] for rank in held[name]}) > 1]
        if not left:
            return []
        digests = world.gather({name: self._read[name][: least[name]] for name in left if name in own}, doing)
        suspects = {name: _unequal([digests[rank][name] for rank in held[name]]) for name in left}
        again = world.gather({name: self._again(name, suspects[name]) for name in left if name in own}, doing)
        return [
            Difference(name, held[name][0], rank, sample)
            for name in left
            for rank in held[name][1:]
            for sample in self._first_of(again[held[name][0]][name], again[rank][name])
        ]

    def _prefix(self, name: str, count: int | None = None) -> str:
        return hashlib.sha256(self._read[name][:count].tobytes()).hexdigest()[:16]

    def _again(self, name: str, places: Sequence[int]) -> list[_Reading]:
        """Read some samples again, given their places in the order of the shard."""
        found = []
        for place in places:
            reading: _Reading = None
            with suppress(Exception):  # as in the first reading
                (sample,) = self._order(name, place, place + 1)
                digest, item = self._digest(name, sample)
                if digest == int(self._read[name][place]):
                    reading = sample, digest, [] if self._exact else roundings_of(item)
            found.append(reading)
        return found

    def _first_of(self, left: Sequence[_Reading], right: Sequence[_Reading]) -> list[int]:
        """Return the first sample that differs, if any does."""
        pairs = ((a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None and a[1] != b[1])
        return [a[0] for a, b in pairs if self._exact or not _alike(a[2], b[2])][:1]


def _unequal(digests: Sequence[npt.NDArray[np.uint64]]) -> list[int]:
    """Return the first places in which not all have the digest of the first one."""
    first, *others = digests
    found: list[int] = np.flatnonzero(np.any([one != first for one in others], axis=0))[:_READ_AGAIN].tolist()
    return found


def _alike(left: Sequence[tuple[str, ...]], right: Sequence[tuple[str, ...]]) -> bool:
    if len(left) != len(right):
        return False
    return all(any(map(str.__eq__, a, b)) for a, b in zip(left, right, strict=True))
