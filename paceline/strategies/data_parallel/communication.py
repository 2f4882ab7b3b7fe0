"""Choice of buckets and formats by measured times, for ``communication="auto"``, and replay of recorded choices.

::

    steps  0 ...  8   float32, default buckets      a step takes 1.0 s: measure the link, predict the other ways
    steps  9 ... 17   int8                          predicted 0.42 s, takes 0.43 s
    steps 18 ... 26   float32, buckets of 1 MB      predicted 0.97 s, takes 0.98 s
    steps 27 ...      int8                          the fastest. If the duration of the exchange changes, start again

A way is a format with a bucket size. Rank 0 decides before a step, and all workers get its decision. Decisions are part
of the strategy's state, so resumed runs and joining workers keep them. With ``exact``, the formats and their first
steps determine the bits of a run: ``communication="0=float32,9=int8"`` repeats them on any number of workers.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from paceline.comm.reduction.buckets import split
from paceline.comm.values import sendable
from paceline.data.feed import MicrobatchGroup
from paceline.errors import ConfigError
from paceline.schedule.communication import Coding, Way, best, computing, link_of, price, trials
from paceline.schedule.link_shares import full
from paceline.schedule.tree import nodes_of
from paceline.settings import Settings
from paceline.step.context import StepResult, TrainingContext
from paceline.step.gradients.formats import codec_for, coding_seconds
from paceline.step.gradients.thermostat import STATE as BITS
from paceline.strategies import requirements
from paceline.strategies.base import Capabilities, Delegating, Strategy
from paceline.strategies.data_parallel.allreduce import AllReduce
from paceline.system.wires import ADAPTIVE, formats_in, spelled

_log = logging.getLogger("paceline")
STATE = "communication"
WARM, TRIAL, WATCH = 3, 6, 20
"""Numbers of steps: unmeasured after a change of way, measured in a trial, and measured in each later window."""
_SIZES = (None, 1.0, 5.0, 25.0)
_MOST_BUCKETS = 1 << 12
"""Maximum number of buckets. Each needs message tags and flags in shared memory, which are limited."""
_DRIFT = 0.25  # choose again if the wait for the exchange changes by this fraction of a step
_FORMATS: dict[str, tuple[str, ...]] = {
    "bits": (),
    "rounding": ("float32", "bfloat16", "fp8-e4m3", "int8"),
    "convergent": ("float32", "bfloat16", "fp8-e4m3", "int8", "fp8-e5m2", ADAPTIVE),
}
"""Formats of each tolerance, from the finest to the coarsest. float16 has the bytes of bfloat16 and takes longer."""
_MOST_OF_E4M3 = 128  # maximum number of microbatches with which fp8-e4m3 is within 1 % of float32
_BUSY, _SHARE = 0.25, 0.05
"""Shares of a step spent on the exchange: above the first, local training is advised, with the second as its aim."""

sendable(Way)


@sendable
class Decision(NamedTuple):
    """Decision of rank 0 between two steps.

    ``reached``: seconds of a step with this way, and how many of them it waits for the exchange. None before all ways
    have been tried.
    """

    way: Way
    text: str = ""
    predicted: float | None = None
    reached: tuple[float, float] | None = None
    looks: bool = False


class ChosenCommunication(Delegating):
    """Strategy whose buckets and formats change between two steps.

    Args:
        context: training context.
        make: function that builds the strategy whose gradients are exchanged.
        capabilities: capabilities of that strategy, by the settings and the number of workers.
    """

    def __init__(
        self,
        context: TrainingContext,
        make: Callable[[TrainingContext], Strategy],
        capabilities: Callable[[Settings, int], Capabilities],
    ) -> None:
        self._context, self._capabilities, self._world = context, capabilities, context.world
        self._able = capabilities(context.settings, context.world.size)
        self._given = formats_in(context.settings.communication)
        self._allowed = self._formats()
        start = {"formats": {0: self._allowed[0]}, "megabytes": None, "reached": None, "workers": self._world.size}
        state = self._world.gather(context.strategy_state.get(STATE), "start")[0]  # some may lack the last decision
        self._state: dict[str, Any] = dict(state or start)
        if self._state["workers"] != self._world.size:
            self._state |= {"workers": self._world.size, "reached": None}
        if self._given:
            self._state["formats"] = self._given
        if not (chooses := context.settings.communication == "auto"):
            self._state["megabytes"] = context.settings.bucket_megabytes
        self._keep()
        wires = [*self._state["formats"].values()]
        self._way = Way(wires[0 if self._given else -1], self._state["megabytes"])
        self._bits = dict(context.strategy_state.get(BITS, {}))
        self._inner = make(self._context_of(self._way))
        self._measures = chooses and self._world.size > 1 and self._has_choice()
        self._tried: dict[Way, tuple[float, float]] = {}  # as in :meth:`_window`
        self._prices: dict[Way, float] = {}
        self._left: list[Way] | None = None  # ways still to be tried. None before they are predicted
        self._patience, self._windows, self._exchange = 1, 0, 0.0
        self._begin_window()
        self._record(None, Decision(self._way))

    def _has_choice(self) -> bool:
        """Return whether another way might be faster. Log the reason if not."""
        if self._world.shared_memory is not None:
            why = "the workers share memory"
        elif len(self._ways()) == 1:
            why = f"no other format or buckets are within tolerance = {self._context.settings.tolerance!r}"
        else:
            return True
        _log.info("communication = 'auto' changes nothing: %s", why)
        return False

    def _context_of(self, way: Way) -> TrainingContext:
        fixed = {"communication": "fixed", "tolerance": "bits", "wire": way.wire, "bucket_megabytes": way.megabytes}
        return replace(self._context, settings=self._context.settings.model_copy(update=fixed))

    def _keep(self) -> None:
        self._context.strategy_state[STATE] = dict(self._state)

    def _begin_window(self) -> None:
        self._seconds: list[float] = []
        self._computing: list[float] = []

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        self._decide(step)
        begin = perf_counter()
        result = self._inner.step(step, groups)
        if self._measures:
            self._seconds.append(perf_counter() - begin)
            self._computing.append(max(self._all_reduce.seconds))
        return result

    # Decisions.

    def _decide(self, step: int) -> None:
        if self._bits != (bits := self._context.strategy_state.get(BITS, {})):
            text = _widening({name: wire for name, wire in bits.items() if wire != self._bits.get(name)})
            self._follow(step, Decision(self._way, text, reached=self._state["reached"]), dict(bits))
        if self._given:
            wire = next(wire for first, wire in reversed(self._given.items()) if first <= step)
            if wire != self._way.wire:
                self._follow(step, Decision(Way(wire, self._way.megabytes), f"{wire}, as given"))
            return
        if self._way.wire not in self._allowed:  # the run resumes with another tolerance
            self._follow(step, Decision(Way(self._allowed[0]), f"{self._allowed[0]}, for the tolerance"))
        settled = self._state["reached"] is not None
        if not self._measures or len(self._seconds) < WARM + (WATCH if settled else TRIAL):
            return
        first = self._world.rank == 0
        decision = self._world.gather(self._evaluate_window(step) if first else None, "step")[0]
        if decision.looks:
            if settled:
                self._world.link_shares = None
            measured = self._measured(step)
            decision = self._world.gather(self._predict(step, *measured) if first else None, "step")[0]
        self._follow(step, decision)

    def _follow(self, step: int, decision: Decision, bits: Mapping[str, str] | None = None) -> None:
        """Apply a decision of rank 0, or ``bits``: formats of parameters, which are the same on all workers."""
        way, renews = decision.way, decision.way != self._way or bits is not None
        if way.wire != self._way.wire and not self._given:
            self._state["formats"] = self._state["formats"] | {step: way.wire}
        self._state |= {"megabytes": way.megabytes, "reached": decision.reached and [*decision.reached]}
        self._keep()
        if renews:
            self._bits = dict(self._bits if bits is None else bits)
            warned = len(self._context.warnings)
            self._way, self._inner = way, self._inner.renew(self._context_of(way))
            del self._context.warnings[warned:]
        if decision.text:
            self._record(step, decision)
        self._begin_window()

    def _record(self, step: int | None, decision: Decision) -> None:
        reached = None if decision.reached is None else decision.reached[0]
        self._context.events.mark(
            "communication",
            **({} if step is None else {"step": step}),
            wire=self._way.wire,
            bucket_megabytes=self._way.megabytes,
            predicted=decision.predicted,
            seconds=reached,
            formats=spelled(self._state["formats"]),
            bits=self._bits,
            chooses=self._context.settings.chooses_wire,
            text=decision.text,
        )
        if decision.text and self._world.rank == 0:
            _log.info("communication from step %d: %s", step, decision.text)

    # On rank 0.

    def _window(self, step: int) -> tuple[float, float]:
        """Return the seconds of a step in this window, and how many of them it waits for the exchange."""
        seconds = median(self._seconds[WARM:])
        return seconds, seconds - sum(computing(median(self._computing[WARM:]), self._microbatches(step)))

    def _evaluate_window(self, step: int) -> Decision:
        """Return the decision after the window that has just ended."""
        seconds, waits = self._window(step)
        if self._state["reached"] is not None:
            usual, waited = self._state["reached"]
            self._windows += 1
            if self._windows < self._patience or abs(waits - waited) <= _DRIFT * usual:
                return Decision(self._way, reached=(usual, waited))
            self._left, self._tried = None, {}
        self._tried[self._way] = seconds, waits
        return Decision(self._way, looks=True) if self._left is None else self._next()

    def _next(self) -> Decision:
        """Return the next way to try, or else the fastest way."""
        assert self._left is not None
        before = next(iter(self._tried))
        instead = f", instead of {self._tried[before][0]:.3g} s with {before}"
        if self._left:
            way = self._left.pop(0)
            return Decision(
                way, f"trying {way}: predicted {self._prices[way]:.3g} s a step{instead}", self._prices[way]
            )
        way = best({one: seconds for one, (seconds, _) in self._tried.items()}, self._allowed)
        seconds, waits = self._tried[way]
        self._patience, self._windows = 1 if way != before else 2 * self._patience, 0
        text = f"{way}: {seconds:.3g} s a step, predicted {self._prices[way]:.3g} s{instead if way != before else ''}"
        return Decision(way, text + self._advice(seconds, waits), self._prices[way], (seconds, waits))

    def _advice(self, seconds: float, waits: float) -> str:
        """Return advice on local training if it would save time and ``tolerance`` allows it."""
        if self._context.settings.tolerance != "convergent" or waits <= _BUSY * seconds:
            return ""
        every = 2 ** math.ceil(math.log2(max(2.0, self._exchange / (_SHARE * (seconds - waits)))))
        return f". strategy = 'diloco' with local.every = {every} would exchange weights in one of {every} steps"

    # Measurements and prices.

    def _formats(self) -> tuple[str, ...]:
        """Return the formats within the tolerance that these workers can send, from the finest to the coarsest."""
        context = self._context
        known = _FORMATS[context.settings.tolerance] or (context.settings.wire,)
        found = []
        for wire in known:
            settings = self._context_of(Way(wire)).settings
            try:
                requirements.check(
                    settings, self._capabilities(settings, self._world.size), None, context.compute.model
                )
            except ConfigError:
                continue
            if wire != "fp8-e4m3" or context.order.microbatches <= _MOST_OF_E4M3:
                found.append(wire)
        return tuple(found)

    def _ways(self) -> dict[Way, list[int]]:
        """Return the bytes of each bucket for each way. Sizes that give the same buckets are one way."""
        context, found = self._context, dict[Way, list[int]]()
        reduction = self._all_reduce.reduction
        collective = reduction.kind == "collective" and not context.settings.fixed_point
        sizes = (None,) if collective and context.settings.tolerance == "bits" else _SIZES
        sends_means = not self._able.divides_update  # else workers send new weights instead, in float32
        size = reduction.describe()["bucket_bytes"] if self._way.megabytes is None else full(self._world.size)
        for wire in self._allowed:
            own = self._context_of(Way(wire))
            codec = codec_for(own, own.update.parameters)
            sums = codec.examples() if codec else [value.detach() for value in own.update.parameters.values()]
            sent = (self._nodes(along_tree=own.settings.along_tree) + sends_means) / 2
            ways = [Way(wire, one) for one in sizes]
            for way in sorted(ways, key=lambda one: one != self._way):
                members = split(
                    sums[::-1], int(size) if way.megabytes is None else int(way.megabytes * 1e6), neighbors=False
                )
                buckets = [int(sent * sum(sums[::-1][one].nbytes for one in run)) for run in members]
                if way != self._way and len(members) > _MOST_BUCKETS:
                    continue
                if not any(known.wire == wire and found[known] == buckets for known in found):
                    found[way] = buckets
        return found

    @property
    def _all_reduce(self) -> AllReduce:
        found = getattr(self._inner, "all_reduce", self._inner)  # sharded strategies reduce with another method
        assert isinstance(found, AllReduce)
        return found

    def _nodes(self, along_tree: bool) -> int:
        """Return the largest number of sums that a worker sends."""
        shares = self._all_reduce.shares(self._context.order.microbatches)
        return max(len(nodes_of(share)) if along_tree else 1 for share in shares)

    def _microbatches(self, step: int) -> int:
        return max(1, len(self._inner.groups(step)))

    def _measured(self, step: int) -> tuple[float, float, dict[str, tuple[float, float, float]]]:
        """Measure the exchange, a small message and the coding of each format. All workers call this together."""
        alone = min(self._all_reduce.exchange_alone(step) for _ in range(2))
        small = []
        for _ in range(3):
            begin = perf_counter()
            self._world.gather(None, "step")
            small.append(perf_counter() - begin)
        own = {wire: coding_seconds(self._context_of(Way(wire))) for wire in self._allowed}
        everyone = self._world.gather(own, "step")
        slowest = {
            wire: tuple(max(one) for one in zip(*(costs[wire] for costs in everyone), strict=True)) for wire in own
        }
        return alone, min(small), slowest

    def _predict(
        self, step: int, alone: float, small: float, coding: Mapping[str, tuple[float, float, float]]
    ) -> Decision:
        """Predict the duration of a step with each way. Return the first way to try."""
        ways, count = self._ways(), self._microbatches(step)
        nbytes = sum(value.numel() * 4 for value in self._context.update.parameters.values())
        link = link_of(ways[self._way], alone, small)
        work = computing(median(self._computing[WARM:]), count)
        self._exchange = alone
        encode, add, decode = coding[self._way.wire]  # already among the measured seconds
        costs = {
            wire: Coding((one[0] + one[1] - encode - add) * nbytes, (one[2] - decode) * nbytes)
            for wire, one in coding.items()
        }
        prices = {way: price(buckets, work, link, costs[way.wire], count) for way, buckets in ways.items()}
        more = self._tried[self._way][0] - prices[self._way]
        self._prices = {way: one + more for way, one in prices.items()}
        self._left = trials(self._prices, self._way)
        return self._next()


def _widening(raised: Mapping[str, str]) -> str:
    """Return a text about parameters whose format gets more bits.

    >>> _widening({"0.weight": "int8", "2.weight": "int8", "4.weight": "float32"})
    'int8 for 0.weight, 2.weight; float32 for 4.weight, because rounding adds noise of more than 58 % of a norm'
    """
    names: dict[str, list[str]] = defaultdict(list)
    for name, wire in raised.items():
        names[wire].append(name)
    told = "; ".join(f"{wire} for {', '.join(every)}" for wire, every in names.items())
    return f"{told}, because rounding adds noise of more than 58 % of a norm"
