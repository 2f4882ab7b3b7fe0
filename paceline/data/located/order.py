"""Sample order of a data set whose shards live on different machines: a pure function of (seed, epoch, step, shards).

::

    shard a    a0 a1 a2 a3 a4 a5     6 microbatches       step 0   a0 a1 b0 c0      batches of 4 microbatches
    shard b    b0 b1 b2              3                    step 1   a2 a3 b1 c1
    shard c    c0 c1 c2              3                    step 2   a4 a5 b2 c2

Each shard is shuffled and cut into microbatches of its own. Microbatch k of the n of a shard has the position (k + u)/n
in the epoch, with a random number u for each shard and epoch, and batches follow these positions. So each batch has
microbatches of a shard in proportion to its size, give or take one. Within a batch they follow the names of the shards:
a worker that has adjacent shards sends few sums.

The order does not depend on which worker has which shard, which workers tell each other whenever they meet.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Collection, Mapping
from functools import lru_cache
from itertools import accumulate, count, pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paceline.comm.world import World
from paceline.data.keys import ORDER, seed_of
from paceline.data.located.agreement import Given, Holding, agree, placement_of, strangers
from paceline.data.located.choice import STEPS, MoveChoice
from paceline.data.located.exchange import SampleExchange
from paceline.data.located.shards import Located, ShardFacts, firsts_of
from paceline.data.order import LARGEST_SHUFFLE, BatchOrder
from paceline.errors import ConfigError, InputError
from paceline.events import EventLog
from paceline.schedule import feistel
from paceline.schedule.microbatch_orders import MicrobatchOrder
from paceline.schedule.placement import Move, after, moves

_log = logging.getLogger("paceline")
Numbers = npt.NDArray[np.int64]


class Part(NamedTuple):
    """Microbatch of an epoch: the index of its shard in the order of their names, and its place in the shard."""

    shard: int
    place: int


class LocatedOrder(BatchOrder):
    """Sample order of located shards. Until the workers have met, those of this worker stand for all.

    Args:
        all_present: whether the workers must have all shards of the run whenever they meet.
    """

    located = True
    drop_last = False
    exchange: SampleExchange | None = None  # of the current membership. None if no samples are sent

    def __init__(
        self, data: Located, batch: int, microbatches: int, seed: int, *, exact: bool, all_present: bool = True
    ) -> None:
        self.batch, self.microbatches, self.seed, self._all_present = batch, microbatches, seed, all_present
        self._data, self._own = data, data.facts(seed, exact=exact)
        self.moves, self.wait_seconds, self.goes_on = data.move != "never", data.wait_seconds, data.lost != "stop"
        self._choice = MoveChoice({"never": False, "samples": True, "auto": None}[data.move])
        self._run = Holding({}, {}, {})  # shards of the run and their holders; empty before the workers have met
        self._placement, self._ranks = "", dict[str, tuple[int, ...]]()
        self.lost_since: dict[str, float] = {}  # times at which workers found that no worker has a shard any more
        self._set_shards(self._own)

    def _set_shards(self, shards: Mapping[str, ShardFacts]) -> None:
        self._names = sorted(shards)
        lengths = {name: shards[name].length for name in self._names}
        self._data.number(lengths)
        self._firsts, self._lengths = [*firsts_of(lengths).values()], [*lengths.values()]
        self._counts: Numbers = -(-np.array(self._lengths) // (self.batch // self.microbatches))  # microbatches
        self._samples, self._total = sum(self._lengths), int(self._counts.sum())
        self._steps = -(-self._total // self.microbatches)  # in an epoch
        self._parts = lru_cache(maxsize=8)(self._parts_of)  # those of a step are asked for several times
        self._readers = lru_cache(maxsize=8)(self._readers_of)
        self._slices = lru_cache(maxsize=8)(self._slices_of)
        self._offsets = lru_cache(maxsize=2)(self._offsets_of)
        self._shuffles = lru_cache(maxsize=2)(self._shuffles_of)

    def cut_by(self, function: MicrobatchOrder) -> None:
        raise ConfigError(
            "microbatch_order mixes the samples of a batch, but of Located data a microbatch has the samples of one "
            "shard, so that one worker has them all: leave it out."
        )

    def facts(self) -> dict[str, int]:
        return {"located": 1, **super().facts()}

    def agreed(self) -> dict[str, object]:
        settings = {
            f"setting {name} of Located": getattr(self._data, name) for name in ("move", "wait_seconds", "lost")
        }
        return {"data in shards": "located", **settings, **super().agreed()}

    def place_of(self, step: int) -> tuple[int, int]:
        return divmod(step, self._steps)

    def first_of(self, epoch: int) -> int:
        return epoch * self._steps

    def samples_of(self, step: int) -> int:
        return self.slices_of(step)[-1].stop

    def samples_before(self, step: int) -> int:
        epoch, index = self.place_of(step)
        before, _ = self._between(epoch, index * self.microbatches, index * self.microbatches)
        return epoch * self._samples + int(self._starts(before).sum())

    def numbers_of(self, step: int) -> list[int]:
        epoch, _ = self.place_of(step)
        return [number for part in self._parts(step) for number in self._numbers(epoch, part)]

    def slices_of(self, step: int) -> tuple[range, ...]:
        return self._slices(step)

    def _slices_of(self, step: int) -> tuple[range, ...]:
        stops = accumulate((len(self._slice(part)) for part in self._parts(step)), initial=0)
        return tuple(range(start, stop) for start, stop in pairwise(stops))

    def holders_of(self, step: int) -> tuple[tuple[int, ...], ...] | None:
        return after(self._moves(step), self._readers(step)) if self._ranks else None

    def _readers_of(self, step: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that have the shard of each microbatch."""
        holders = self.holders
        return tuple(holders[part.shard] for part in self._parts(step))

    def sends(self, step: int) -> bool:
        return bool(self._moves(step))

    def _moves(self, step: int) -> tuple[Move, ...]:
        sends = self.exchange is not None and step in self._choice.sending
        return moves(self._readers(step), self.exchange.world.size) if self.exchange and sends else ()

    @property
    def names(self) -> list[str]:
        """Names of the shards, in ascending order."""
        return self._names

    @property
    def holders(self) -> list[tuple[int, ...]]:
        """Ranks that have each shard, in the order of :attr:`names`. Empty if no worker has it."""
        return [self._ranks.get(name, ()) for name in self._names]

    def shards_of(self, step: int) -> list[int]:
        """Return the index of the shard of each microbatch of a step."""
        return [part.shard for part in self._parts(step)]

    def example(self, step: int) -> tuple[int, list[range]]:
        if not self._own:
            return step, []
        own = {self._names.index(name) for name in self._own}
        found = (
            (one, place) for one in count(step) for place, part in enumerate(self._parts(one)) if part.shard in own
        )
        at, place = next(found)
        return at, [range(place, place + 1)]

    def _parts_of(self, step: int) -> list[Part]:
        """Return the microbatches of a step."""
        epoch, index = self.place_of(step)
        start = index * self.microbatches
        _, parts = self._between(epoch, start, min(start + self.microbatches, self._total))
        if not (self.incomplete and self._ranks):
            return sorted(parts)
        found = sorted(part for part in parts if self._names[part.shard] in self._ranks)
        if not found:
            raise InputError(f"No worker has a sample of step {step} any more: its shards are lost.")
        return found

    def _between(self, epoch: int, start: int, stop: int) -> tuple[Numbers, list[Part]]:
        """Return the number of microbatches of each shard before place ``start`` of an epoch, and those up to ``stop``.

        Of all microbatches only those near these places are sorted: before the position x are x times their number,
        give or take one for each shard.
        """
        shards, offsets = len(self._names), self._offsets(epoch)
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
        generator = torch.Generator().manual_seed(seed_of(ORDER, self.seed, epoch))
        drawn = torch.rand(len(self._names), dtype=torch.float64, generator=generator)
        return np.asarray(drawn, np.float64)

    def _starts(self, index: Numbers) -> Numbers:
        """Return the number of samples before a microbatch of each shard. Their sizes differ by at most one."""
        short, longer = np.divmod(np.array(self._lengths), self._counts)
        starts: Numbers = index * short + np.minimum(index, longer)
        return starts

    def _slice(self, part: Part) -> range:
        """Return the positions of a microbatch in the permutation of its shard."""
        short, longer = divmod(self._lengths[part.shard], int(self._counts[part.shard]))
        start = part.place * short + min(part.place, longer)
        return range(start, start + short + (part.place < longer))

    def _numbers(self, epoch: int, part: Part) -> list[int]:
        """Return the sample numbers of a microbatch in the whole data set."""
        own, first = self._slice(part), self._firsts[part.shard]
        if self._samples > LARGEST_SHUFFLE:
            seed = seed_of(ORDER, self.seed, epoch, part.shard)
            found = feistel.permute(own.start, own.stop, self._lengths[part.shard], seed)
        else:
            found = self._shuffles(epoch)[part.shard][own.start : own.stop].tolist()
        return [first + sample for sample in found]

    def _shuffles_of(self, epoch: int) -> list[torch.Tensor]:
        """Return a permutation of each shard."""
        seeds = [seed_of(ORDER, self.seed, epoch, shard) for shard in range(len(self._names))]
        generators = (torch.Generator().manual_seed(seed) for seed in seeds)
        return [torch.randperm(length, generator=one) for length, one in zip(self._lengths, generators, strict=True)]

    def meet(self, world: World, doing: str, without: bool = False) -> None:
        given = self._gather(world, doing)
        self.incomplete = without
        self._run, self._ranks = agree(given, all_present=self._all_present and not without)
        if not without:
            self.lost_since.clear()
        self._set_shards(self._run.shards)
        if self._data.move == "auto":
            self._placement = placement_of(given)
            known = self._run.choices.get(self._placement)
            self._choice, self.moves = MoveChoice(known), known is not False
        sends = self.moves and world.size > 1
        self.exchange = SampleExchange(world, self._moves, self._bytes_of) if sends else None

    def choose(self, step: int, asked: int, events: EventLog) -> None:
        """Measure a step, and decide with the other workers if enough steps are measured. All workers call this.

        Args:
            asked: newest step whose microbatches this worker has asked for.
        """
        choice = self._choice
        if self.exchange is None or not choice.begin(step, perf_counter()):
            return
        world = self.exchange.world
        seconds, others = zip(*world.gather((choice.seconds, asked), "step"), strict=True)
        readers = [self._readers(one) for one in range(max(0, step - STEPS), step)]
        text = choice.go_on(max(seconds), max(others) + 1, readers, world.size)
        if choice.sends is not None:
            self._run.choices[self._placement] = choice.sends
        if text:
            events.mark("note", text=text)
            _log.log(logging.INFO if world.rank == 0 else logging.DEBUG, text)

    def strangers(self, world: World, joined: Collection[int], doing: str) -> dict[int, str]:
        """Return why workers cannot join, by rank, given the ranks that do. All workers call this together."""
        return strangers(self._gather(world, doing), joined)

    def _gather(self, world: World, doing: str) -> list[Given]:
        return world.gather((platform.node(), self._own, self._run), doing)

    def _bytes_of(self, step: int, microbatch: int) -> int:
        """Return the expected size of a microbatch."""
        part = self._parts(step)[microbatch]
        return len(self._slice(part)) * self._run.shards[self._names[part.shard]].bytes

    def state(self, step: int) -> dict[str, Any]:
        shards = {name: list(one) for name, one in self._run.shards.items()}
        return {"shards": shards, "holders": self._run.holders, "choices": {**self._run.choices}}

    def load(self, state: dict[str, Any]) -> None:
        """Take the shards of the run from a state. The workers compare them with their own when they meet."""
        shards = {name: ShardFacts(*one) for name, one in state["shards"].items()}
        self._run = Holding(shards, state["holders"], {**state.get("choices", {}), **self._run.choices})
