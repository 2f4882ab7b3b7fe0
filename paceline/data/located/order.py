"""Sample order of a data set whose shards live on different machines: a pure function of (seed, epoch, step, shards).

Shards of known lengths are shuffled and mixed in proportion (``shuffled``), and streams take turns (``turns``). A
microbatch has samples of one shard. Within a batch microbatches follow the names of the shards: a worker that has
adjacent shards sends few sums.

The order does not depend on which worker has which shard, which workers tell each other whenever they meet.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from time import perf_counter
from typing import Any

from paceline.comm.world import World
from paceline.data.comparison import compared
from paceline.data.keys import preserve_generators
from paceline.data.located.agreement import Given, Holding, agree, not_the_same, placement_of, ranks_of, strangers
from paceline.data.located.choice import STEPS, MoveChoice
from paceline.data.located.contents import Contents
from paceline.data.located.exchange import SampleExchange
from paceline.data.located.readers import ShardReader, agreed
from paceline.data.located.shards import Located, ShardFacts, facts_of
from paceline.data.located.shuffled import Part, Shuffled
from paceline.data.located.turns import Reading, Turns
from paceline.data.order import BatchOrder
from paceline.data.streams.reader import is_stream
from paceline.errors import ConfigError, DisagreementError, InputError
from paceline.events import EventLog
from paceline.schedule.microbatch_orders import MicrobatchOrder
from paceline.schedule.placement import Move, after, moves

_log = logging.getLogger("paceline")
_AHEAD = 4
"""Number of steps, the current one included, whose microbatches are known when it begins: the next ones are loaded."""
_MORE = 6
"""Number of steps of which workers tell each other more, so that they do not do so in every step."""


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
        self._data, self._own, size = data, data.facts(seed, exact=exact), batch // microbatches
        self._contents = Contents(data, seed, exact=exact)
        with preserve_generators():
            self.streams = {
                name: ShardReader(name, shard, seed, size) for name, shard in data.shards.items() if is_stream(shard)
            }
            for name, reader in self.streams.items():
                items = reader.items(0, 0)
                self._own[name] = facts_of(None, [items[place] for place in compared(len(items))], exact=exact)
        self.moves, self.wait_seconds, self.goes_on = data.move != "never", data.wait_seconds, data.lost != "stop"
        self._choice = MoveChoice({"never": False, "samples": True, "auto": None}[data.move])
        self._run = Holding({}, {}, {}, {})  # shards of the run and their holders; empty before the workers have met
        self._placement, self._ranks = "", dict[str, tuple[int, ...]]()
        self.lost_since: dict[str, float] = {}  # times at which workers found a shard lost
        self._set_shards(self._own)

    def _set_shards(self, shards: Mapping[str, ShardFacts]) -> None:
        self._names = sorted(shards)
        lengths = {name: one.length for name, one in shards.items() if one.length is not None}
        self._data.number(lengths)
        size = self.batch // self.microbatches
        self._plan: Shuffled | Turns
        if len(lengths) == len(shards):
            self._plan = Shuffled(lengths, size, self.microbatches, self.seed)
        else:
            self._plan = Turns(size, self.microbatches, self.seed)
            self._plan.hear({name: self._run.readings.get(name, Reading([])) for name in shards})
        self.known = self._plan.known
        self._parts = lru_cache(maxsize=8)(self._parts_of)  # those of a step are asked for several times
        self._readers = lru_cache(maxsize=8)(self._readers_of)
        self._slices = lru_cache(maxsize=8)(self._slices_of)

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
        return self._plan.place_of(step)

    def first_of(self, epoch: int) -> int:
        return self._plan.first_of(epoch)

    def samples_of(self, step: int) -> int:
        return self.slices_of(step)[-1].stop

    def samples_before(self, step: int) -> int:
        return self._plan.samples_before(step)

    def numbers_of(self, step: int) -> list[int]:
        epoch, _ = self.place_of(step)
        return [number for part in self._parts(step) for number in self._plan.numbers_of(epoch, part)]

    def slices_of(self, step: int) -> tuple[range, ...]:
        return self._slices(step)

    def _slices_of(self, step: int) -> tuple[range, ...]:
        epoch, _ = self.place_of(step)
        stops = accumulate((self._plan.size_of(epoch, part) for part in self._parts(step)), initial=0)
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

    def shard_of(self, step: int, microbatches: Collection[int]) -> str:
        all_shards = self.shards_of(step)
        shards = {all_shards[microbatch] for microbatch in microbatches}
        return self._names[shards.pop()] if len(shards) == 1 else ""

    def example(self, step: int) -> tuple[int, list[range]]:
        own = {self._names.index(name) for name in self._own}
        for at in range(step, self.known if own else step):
            for place, part in enumerate(self._parts(at)):
                if part.shard in own:
                    return at, [range(place, place + 1)]
        return step, []

    def _parts_of(self, step: int) -> list[Part]:
        """Return the microbatches of a step."""
        if step >= self.known:
            raise self._unknown(step)
        parts = sorted(self._plan.parts_of(step))
        if not (self.incomplete and self._ranks):
            return parts
        found = [part for part in parts if self._names[part.shard] in self._ranks]
        if not found:
            raise InputError(f"No worker still has a sample of step {step}: its shards are lost.")
        return found

    def _unknown(self, step: int) -> InputError | ConfigError:
        if empty := [name for name, one in self._run.readings.items() if one.is_empty]:
            return InputError(
                f"Shard {empty[0]!r} gives no samples in epoch {len(self._run.readings[empty[0]].ends)}. Each epoch "
                f"iterates over a stream again: an object that is used up after one pass must begin again in __iter__."
            )
        return ConfigError(
            f"The batch of step {step} is not known, because workers tell each other about streams in session.step: "
            f"at most {_AHEAD - 2} batches in a row can be left out."
        )

    def read(self, epoch: int, numbers: Sequence[int]) -> list[Any]:
        """Return samples of whole microbatches of streams by number. Lists and dictionaries may be changed."""
        plan, found = self._plan, list[Any]()
        assert isinstance(plan, Turns)
        for part, _ in groupby(map(plan.part_of, numbers)):
            found += self.streams[self._names[part.shard]].items(epoch, part.place, plan.size_of(epoch, part))
        return found

    def read_ahead(self, step: int) -> dict[str, Reading]:
        """Read the streams of this worker as far as :meth:`read_on` needs, and return their readings."""
        plan = self._plan
        if not isinstance(plan, Turns) or plan.known >= step + _AHEAD or plan.is_over:
            return {}
        rounds, known = plan.rounds_for(step + _AHEAD + _MORE), self._run.readings
        now, oldest = (dict(zip(self._names, plan.next_of(max(0, one)), strict=True)) for one in (step, step - 2))
        with preserve_generators():
            return {
                name: reader.read_to(known[name], plan.epoch, rounds, now[name], oldest[name])
                for name, reader in self.streams.items()
            }

    def read_on(self, step: int, doing: str = "step") -> None:
        """Read streams ahead, and tell the other workers. All workers call this together at the beginning of a step."""
        plan = self._plan
        while isinstance(plan, Turns) and plan.known < step + _AHEAD and not plan.is_over:
            readings = agreed(self._world.gather(self.read_ahead(step), doing))
            self._run = self._run._replace(readings=readings)
            plan.hear(readings)
            self.known = plan.known

    def meet(self, world: World, doing: str, without: bool = False) -> None:
        given = self._gather(world, doing)
        self._world, self.incomplete = world, without
        self._run, self._ranks = agree(given, all_present=self._all_present and not without)
        for what in self._differences(world, given, doing).values():
            raise DisagreementError(what)
        if not without:
            self.lost_since.clear()
        self._set_shards(self._run.shards)
        if self._data.move == "auto":
            self._placement = placement_of(given)
            known = self._run.choices.get(self._placement)
            self._choice, self.moves = MoveChoice(known), known is not False
        for name, reader in self.streams.items():
            reader.begin_from(self._run.readings[name])
        self.read_on(0, doing)
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
        given = self._gather(world, doing)
        return strangers(given, joined) or self._differences(world, given, doing, joined)

    def _differences(
        self, world: World, given: Sequence[Given], doing: str, joined: Collection[int] = ()
    ) -> dict[int, str]:
        """Return how the samples of workers differ from those of others that have the same shards, by rank."""
        held = ranks_of(given).items()
        every = {name: ranks for name, ranks in held if given[ranks[0]][1][name].length is not None}  # no streams
        found = self._contents.compare(world, every, doing, joined)
        return {
            one.right: not_the_same(given, one.shard, one.left, one.right, f"sample {one.sample} has different values")
            for one in found
        }

    def _gather(self, world: World, doing: str) -> list[Given]:
        return world.gather((platform.node(), self._own, self._run), doing)

    def _bytes_of(self, step: int, microbatch: int) -> int:
        """Return the expected size of a microbatch."""
        part = self._parts(step)[microbatch]
        return self._plan.size_of(self.place_of(step)[0], part) * self._run.shards[self._names[part.shard]].bytes

    def state(self, step: int) -> dict[str, Any]:
        shards = {name: list(one) for name, one in self._run.shards.items()}
        readings = {name: list(one) for name, one in self._run.readings.items()}
        return {"shards": shards, "holders": self._run.holders, "choices": {**self._run.choices}, "readings": readings}

    def load(self, state: dict[str, Any]) -> None:
        """Take the shards of the run from a state. The workers compare them with their own when they meet."""
        shards = {name: ShardFacts(*one) for name, one in state["shards"].items()}
        readings = {  # a stream that was used up may begin again here
            name: Reading(*one)._replace(is_empty=False) for name, one in state.get("readings", {}).items()
        }
        self._run = Holding(shards, state["holders"], {**state.get("choices", {}), **self._run.choices}, readings)
