"""Reductions of gradients and exchanges of weights as operations of :mod:`paceline.planning.simulate`.

They replay ``comm.reduction``: the same buckets, shares, homes, windows and order of the phases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from paceline.planning.costs import Work
from paceline.planning.simulate import Compute, Exchange, Place, Step, Wait
from paceline.schedule import slices
from paceline.schedule.balance import LayerCost
from paceline.schedule.link_shares import WINDOW_BUCKETS, bucket_bytes, full, of_links, windows
from paceline.strategies.sharded.holders import writer_of

_MOST_RUNS = 64
"""Largest number of full buckets that are simulated. For a larger model, each has more bytes."""
_MOST_HOMES = 64
"""Largest number of homes with a bucket of their own. More of them have equal chunks of a bucket."""


class Bucket(NamedTuple):
    """Bucket of gradients."""

    nbytes: float  # its size
    full_after: int  # number of layers, from the last, after whose backward pass it is full
    begun_after: int  # number of layers after whose backward pass it gets its first gradient
    home: int | None = None  # rank of the worker that adds it up. None if each worker adds up a chunk.
    after: int = -1  # index of the bucket before it in the same memory, or -1


def buckets_of(
    layers: Sequence[LayerCost], size: float, homes: int = 1, windowed: bool = False, whole: bool = False
) -> tuple[Bucket, ...]:
    """Return the buckets in the order in which the backward pass fills them.

    Args:
        size: bytes of a full bucket.
        homes: number of workers that own the gradients. With 1, no worker does.
        windowed: whether later buckets overwrite earlier ones.
        whole: whether a layer belongs to one worker, as at parameter servers.
    """
    return _packed(tuple(layer.parameter_bytes for layer in reversed(layers)), size, homes, windowed, whole)


@lru_cache(maxsize=64)
def _packed(nbytes: tuple[int, ...], size: float, homes: int, windowed: bool, whole: bool) -> tuple[Bucket, ...]:
    size = max(size, sum(nbytes) / _MOST_RUNS)
    runs = _runs(nbytes, size)
    if homes == 1 and not whole:
        sums = [sum(nbytes[index] for index in run) for run in runs]
        return tuple(Bucket(one, run[-1] + 1, run[0] + 1) for one, run in zip(sums, runs, strict=True) if one)
    parts = sorted(slices.whole(nbytes, homes) if whole else slices.even(nbytes, runs, homes))
    made = []
    for run in _runs([part.stop - part.start for part in parts], size):
        of_home: dict[int, list[slices.Slice]] = {}
        for part in (parts[index] for index in run):
            of_home.setdefault(part.owner, []).append(part)
        for home, own in sorted(of_home.items()):
            if total := sum(part.stop - part.start for part in own):
                made.append(Bucket(total, own[-1].parameter + 1, own[0].parameter + 1, home))
    if not windowed:
        return tuple(made)
    capacity = max(WINDOW_BUCKETS * size, 2 * max(one.nbytes for one in made))
    placed = windows([int(one.nbytes) for one in made], int(capacity))
    return tuple(one._replace(after=after) for one, (_, after) in zip(made, placed, strict=True))


def _runs(nbytes: Sequence[int], size: float) -> list[list[int]]:
    """Return the indices of the blocks of each run, which ends when it has this size."""
    runs: list[list[int]] = []
    held = 0
    for index, one in enumerate(nbytes):
        if not held:
            runs.append([])
        runs[-1].append(index)
        held = 0 if held + one >= size else held + one
    return runs


class Updaters(NamedTuple):
    """Workers that keep the means and spread the weights."""

    homes: int  # number of these workers, which have the first ranks
    copies: int = 0  # number of workers that make the same updates as each of them
    shared: bool = False  # whether one worker of each other machine receives weights for all
    windowed: bool = False  # see :func:`buckets_of`
    whole: bool = False  # see there


class Reduction:
    """Average of gradients: in shared memory, between machines, or both (``comm.reduction.choice``).

    Args:
        counts: sums that each worker sends.
        owners: workers with which the means stay. None: all workers get them.
    """

    def __init__(
        self,
        work: Work,
        place: Place,
        rank: int,
        step: int,
        counts: Sequence[int],
        layers: Sequence[LayerCost],
        owners: Updaters | None = None,
    ) -> None:
        self._work, self._step, self._counts, self._rank, self._owners = work, step, counts, rank, owners
        hosts = place.hosts
        self._host_of = place.of_worker
        self._group, self._own = place.group, tuple(next(host for host in hosts if rank in host))
        self._inside, self._machines = len(self._own), len(hosts)
        self._shared = any(len(host) > 1 for host in hosts) and not (owners and len(hosts) > 1)
        across = self._machines if self._shared else place.workers
        self._peers = across - 1 if self._machines > 1 else 0
        self._nodes = 1 if self._shared and self._peers else counts[rank]
        self._others = self._peers if self._shared else sum(counts) - sum(counts[one] for one in self._own)
        self._columns = self._inside if self._shared else 1
        self._receivers = self._peers if self._shared else place.workers - self._inside  # of a worker's sums
        self._takers = self._peers
        if owners:
            self._receivers = min(self._receivers, owners.homes)
            self._takers = (self._machines - 1 if owners.shared else place.workers - self._inside) - owners.copies
        size, self._part = full(across * self._columns if self._peers else 1), 1 / across
        rates = [place.machines[place.of_worker[host[0]]].bytes_per_second for host in hosts]
        if not owners and self._peers and len({*rates}) > 1 and len(hosts) > 2:
            self._part = of_links(rates)[hosts.index([*self._own])]
            size = min(size, bucket_bytes(int(work.parameter_bytes), len(hosts)))
        self._kept = self._part if self._shared else self._part * self._inside  # on this machine
        self._at_homes = owners if owners and self._peers and owners.homes <= _MOST_HOMES else None
        if self._at_homes is None:
            self.buckets = buckets_of(layers, size)
        else:
            self.buckets = buckets_of(layers, size, self._at_homes.homes, self._at_homes.windowed, self._at_homes.whole)
        self._left: deque[Hashable] = deque()

    @property
    def updated(self) -> float:
        """Part of the parameters that this worker updates."""
        if self._owners is None:
            return 1.0
        if self._at_homes is None:
            return (1 + self._owners.copies) / self._owners.homes * (self._rank < self._owners.homes)
        mine = (one.nbytes for one in self.buckets if one.home is not None and self._updates(one.home))
        return sum(mine) / sum(one.nbytes for one in self.buckets)

    def overlapped(self, layers: Sequence[LayerCost]) -> Iterator[Step]:
        """Run a backward pass that sends each full bucket and adds up the ones before it."""
        sent = reduced = 0
        for done, layer in enumerate(reversed(layers), start=1):
            yield Compute(layer.backward, self._work.core_load)
            room = 1 + max((one.after for one in self.buckets if one.begun_after == done), default=-1)
            room = min(room, sent)
            while reduced < room:  # its memory holds earlier sums
                yield from self._reduce(reduced)
                reduced += 1
            while sent < len(self.buckets) and self.buckets[sent].full_after <= done:
                yield from self._scatter(sent)
                sent += 1
                if self._at_homes is None and reduced < sent - (sent < len(self.buckets)):
                    yield from self._reduce(reduced)
                    reduced += 1
        for bucket in range(reduced, len(self.buckets)):
            yield from self._reduce(bucket)
        yield from self._await_left()

    def spread(self) -> Iterator[Step]:
        """Send the weights of all buckets from their homes to all others."""
        for index, bucket in enumerate(self.buckets):
            if bucket.after >= 0:
                yield from self._await_left(index - bucket.after - 1)
            yield from self._spread(index)
        yield from self._await_left()

    def _scatter(self, index: int) -> Iterator[Step]:
        """Send a full bucket."""
        if self._shared or not self._peers:
            yield Exchange(self._own, ("gradients", self._step, index), 0, 0)
        else:
            yield from self._across(index)

    def _across(self, index: int) -> Iterator[Step]:
        nbytes, home = self.buckets[index].nbytes / self._columns, self.buckets[index].home
        if home is not None:  # the whole bucket goes to one worker
            mine = home == self._rank
            yield Compute(self._work.message_seconds * self._nodes)
            sent = 0.0 if home in self._own else self._nodes * nbytes
            received = self._others * nbytes if mine else 0.0
        else:
            yield Compute(self._work.message_seconds * self._nodes * self._peers)
            sent = self._nodes * (1 - self._kept) * nbytes
            received = self._others * self._part * nbytes
        yield Exchange(self._group, ("sums", self._step, index), sent, received, self._receivers)

    def _reduce(self, index: int) -> Iterator[Step]:
        """Wait for the parts of a bucket, add them up, and send the means."""
        rate, bucket = self._work.add_bytes_per_second, self.buckets[index]
        if self._shared or not self._peers:
            yield Wait(("gradients", self._step, index))
            parts = sum(self._counts[one] for one in self._own)
            copies = 0 if self._owners else self._inside - 1
            yield Compute((parts + copies) * bucket.nbytes / self._inside / rate)
            if not self._peers:
                if not self._owners:
                    yield from self._spread(index)
                return
            yield from self._across(index)
        if bucket.home is not None:
            yield from self._reduce_at_home(index, bucket, bucket.home)
            return
        yield Wait(("sums", self._step, index))
        parts = self._machines if self._shared else sum(self._counts)
        yield Compute(parts * bucket.nbytes * self._part / self._columns / rate)
        if not self._owners:
            yield from self._spread(index)

    def _reduce_at_home(self, index: int, bucket: Bucket, home: int) -> Iterator[Step]:
        assert self._at_homes is not None
        mine = home == self._rank
        if mine:  # the others only have to send
            yield Wait(("sums", self._step, index))
            yield Compute(sum(self._counts) * bucket.nbytes / self._work.add_bytes_per_second)
        else:
            self._left.append(("sums", self._step, index))
        if self._at_homes.copies:
            key = "means", self._step, index
            sent = self._at_homes.copies * bucket.nbytes if mine else 0.0
            yield Exchange(self._group, key, sent, bucket.nbytes if self._is_copy(home) else 0.0, asked=True)
            self._left.append(key)

    def _spread(self, index: int) -> Iterator[Step]:
        """Send the means of a bucket, or the weights, to all others."""
        nbytes, home = self.buckets[index].nbytes, self.buckets[index].home
        key = "weights" if self._owners else "means", self._step, index
        self._left.append(key)
        if not self._peers:
            if self._owners and not self._owners.shared:
                yield Compute((self._inside - 1) * nbytes / self._inside / self._work.add_bytes_per_second)
            yield Exchange(self._own, key, 0, 0)
        elif self._at_homes is not None and home is not None:
            yield Compute(self._work.message_seconds)
            takes = home not in self._own and not self._is_copy(home)
            if self._at_homes.shared:
                takes &= self._is_writer(home)
            sent = self._takers * nbytes * (home == self._rank)
            yield Exchange(self._group, key, sent, takes * nbytes, min(self._takers, self._at_homes.homes))
        else:
            nbytes /= self._columns
            yield Compute(self._work.message_seconds * self._takers)
            received = self._takers * self._part if self._owners else 1 - self._kept
            yield Exchange(self._group, key, self._takers * self._part * nbytes, received * nbytes, self._takers)

    def _updates(self, home: int) -> bool:
        return home == self._rank or self._is_copy(home)

    def _is_writer(self, home: int) -> bool:
        """Return whether this worker receives the shares of a worker of another machine for its own machine."""
        return home not in self._own and writer_of(home, self._own) == self._rank

    def _is_copy(self, home: int) -> bool:
        """Return whether this worker makes the updates of an owner, too (``strategies.sharded.holders``)."""
        assert self._at_homes is not None
        behind = (self._host_of[self._rank] - self._host_of[home]) % self._machines
        return 0 < behind <= self._at_homes.copies and self._is_writer(home)

    def _await_left(self, count: int = 0) -> Iterator[Step]:
        """Wait for all buckets on their way except the last ``count``."""
        while len(self._left) > count:
            yield Wait(self._left.popleft())
