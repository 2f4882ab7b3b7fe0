"""Workers and parts of a step that take more time than necessary.

The workers of a synchronous step begin it one after the other and end it together. So in each step the slowest worker
is the one with the most time of its own, and all lose the time that it takes beyond the others' median::

    rank 0   ▒ load ▓ compute ░░░░░░░ awaits others ║        own time = time since the last step - awaits others
    rank 1   ▒ load ▓ compute ░░░░░░░░░░░░░░░░░░░░░ ║
    rank 2   ▒ load ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ compute ░░░ ║        rank 2 takes the excess; what it awaits is the exchange
                              ◄──── excess ────►

No clock is compared with that of another machine: only durations are. After StageFrontier (arXiv 2606.06751).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from paceline.observe import noise
from paceline.observe.records import number
from paceline.observe.why.advice import Advice, advise
from paceline.observe.why.links import SlowLink
from paceline.observe.why.times import Times

LEAST_SHARE = 0.02  # smallest share of the time that is worth a sentence
_PROBE_SECONDS = 1.0
"""Time that probes may take in the first steps of any run. A rank that is always slow is slow there, too."""
_OF_LINK = 0.25
"""Smallest share of the exchange in which workers wait for a slow link. Records cover only its first half, the sums."""
_OF_STAGE = 0.75  # share of the time lost by ranks in turn from which it counts as one stage's
_UPDATES_LAST = ("parameter-server", "sharded")  # strategies in which all workers wait for the update of each
_OF_RANK_0 = ("checkpoint", "weights")  # pauses in which rank 0 writes for all


@dataclass(frozen=True)
class Culprit:
    """Part of the time that would be saved if the rank or the part of a step took no longer than necessary."""

    kind: str  # "compute", "update", "load", "script", "start", a pause, or "exchange" if it is a link
    share: float  # of the time of the run
    rank: int | None = None
    host: str | None = None
    stage: int | None = None  # of a pipeline
    layer: str | None = None  # layers of the stage, such as ``blocks.2 to blocks.5``
    sender: int | None = None  # of a slow link, whose slow end is the rank. None if the data of several come slowly
    receiver: int | None = None  # of a slow link. None if the data come slowly to several

    @property
    def of_ranks(self) -> bool:
        """Whether the cause is one rank, or several ranks in turn."""
        return self.rank is not None or self.kind == "compute"


@dataclass(frozen=True)
class Findings:
    """Where the time of a run went."""

    steps: int = 0  # number of steps that were looked at
    seconds: float = 0.0  # duration of these steps
    culprits: list[Culprit] = field(default_factory=list)  # the largest share first, ranks of a kind together
    advice: list[Advice] = field(default_factory=list)  # the largest gain first
    noise: noise.NoiseScale | None = None  # gradient noise scale. None if too few steps were sampled
    delayed: float = 0.0  # share of the time for which the median worker lacks a core

    def data(self) -> dict[str, Any]:
        """Return the culprits, the advice and the gradient noise scale as JSON values."""
        found = asdict(self)
        return {name: found[name] for name in ("culprits", "advice", "noise", "delayed")}


def explain(
    steps: Sequence[Mapping[int, Times]],
    about: Mapping[int, Mapping[str, Any]] | None = None,
    pauses: Mapping[str, float] | None = None,
    start: Mapping[str, Any] | None = None,
    link: SlowLink | None = None,
    first: Sequence[Mapping[int, Times]] = (),
) -> Findings:
    """Return which workers and parts of a step take the time of some steps.

    Args:
        steps: durations of each step by rank.
        about: ``host`` and ``stage`` of ranks, if known.
        pauses: seconds of saves and evaluations, by event.
        start: settings of the run that decide what may be advised, from its event ``start``.
        link: link that is slower than the others, if there is one.
        first: durations of the first steps of the run, which probe and warm up.

    >>> fast, slow = Times(0.0, 0.0, 1.0, 1.5), Times(0.0, 0.0, 2.0, 0.5)
    >>> explain([{0: fast, 1: slow, 2: fast}] * 4).culprits[0]
    Culprit(kind='compute', share=0.4, rank=1, host=None, stage=None, layer=None, sender=None, receiver=None)
    """
    # workers may end a step one after the other
    lasting = [max(median(map(sum, step.values())), *(one.own for one in step.values())) for step in steps]
    training = sum(lasting)
    if not training:
        return Findings()
    lost = _lost_at_start(first, steps)
    total = training + sum(lost.values())
    pauses = pauses or {}
    about, start = about or {}, start or {}
    microbatches = number(start.get("microbatches")) or math.inf
    for step, rest in zip(steps, lasting, strict=True):
        for phase in _phases(step, start):
            slowest = max(phase, key=lambda rank: phase[rank].own)
            others = [times for rank, times in phase.items() if rank != slowest] or [phase[slowest]]
            usual = Times(*(median(column) for column in zip(*others, strict=True)))
            excess = phase[slowest].beyond(usual)
            lost[max(excess, key=excess.__getitem__), slowest] += max(0.0, phase[slowest].own - usual.own)
            lost["update", None] += usual.update
            rest -= phase[slowest].own
        for other, times in step.items() if start.get("strategy") == "stealing" else ():  # the others compute for it
            for kind, seconds in times.beyond(usual).items():
                lost[kind, other] += max(0.0, seconds) / len(step) if kind != "compute" else 0.0
        lost["exchange", None] += max(0.0, rest - _filling(step, about, slowest) / microbatches)
        lost["load", None] += usual.load
        lost["script", None] += usual.script
    _take_pauses(lost, pauses)
    ends: dict[str, Any] = {}
    if link is not None and link.seconds > _OF_LINK * lost["exchange", None]:
        lost["exchange", link.rank] = lost.pop(("exchange", None))
        ends = {"sender": link.sender, "receiver": link.receiver}
    for kind in ("load", "script", "update", "exchange"):  # a worker that lacks a core takes longer for all of them
        lost[kind, None] *= 1 - start.get("delayed", 0.0)
    culprits = [
        Culprit(
            kind,
            round(seconds / total, 4),
            rank,
            **({} if rank is None else about.get(rank, {})),
            **(ends if kind == "exchange" else {}),
        )
        for (kind, rank), seconds in lost.items()
        if seconds >= LEAST_SHARE * total
    ]
    culprits += _in_turn(lost, about, total, start.get("delayed", 0.0))
    of_ranks: dict[str, float] = defaultdict(float)  # workers that are slow in turn count together
    shares: dict[str, float] = defaultdict(float)  # of the time without the start, which no setting changes
    for one in culprits:
        of_ranks[one.kind] += one.share if one.of_ranks else 0.0
        shares[one.kind] += one.share * total / training
    culprits.sort(key=lambda one: (-(of_ranks[one.kind] if one.of_ranks else one.share), -one.share))
    fixed = not pauses.get("map") and not pauses.get("extend")
    advice = advise(shares, start, steps, len(steps) / training, LEAST_SHARE, fixed)
    return Findings(len(steps), total, culprits, advice)


def _in_turn(
    lost: Mapping[tuple[str, int | None], float], about: Mapping[int, Mapping[str, Any]], total: float, delayed: float
) -> list[Culprit]:
    """Return the culprit for ranks that are slow in turn, as with longer samples, each too rarely to be named."""
    stages: dict[Any, float] = defaultdict(float)
    for (kind, rank), seconds in lost.items():
        if kind == "compute" and rank is not None and seconds < LEAST_SHARE * total:
            stages[about.get(rank, {}).get("stage"), about.get(rank, {}).get("layer")] += seconds * (1 - delayed)
    seconds = sum(stages.values())
    if seconds < LEAST_SHARE * total:
        return []
    stage, layer = max(stages, key=stages.__getitem__)
    if stages[stage, layer] < _OF_STAGE * seconds:
        stage = layer = None
    return [Culprit("compute", round(seconds / total, 4), stage=stage, layer=layer)]


def _take_pauses(lost: dict[tuple[str, int | None], float], pauses: Mapping[str, float]) -> None:
    """Move the seconds of pauses from the script, first from that of all workers, to kinds of their own."""
    for event, left in pauses.items():
        for rank in (None, *sorted(rank for kind, rank in lost if kind == "script" and rank is not None)):
            part = min(left, lost["script", rank])
            left -= part
            lost["script", rank] -= part
            lost[event, None if event in _OF_RANK_0 and rank == 0 else rank] += part


def _phases(step: Mapping[int, Times], start: Mapping[str, Any]) -> list[Mapping[int, Times]]:
    """Return the durations of the phases of a step after each of which all workers wait. The update is the first.

    Dedicated servers, the first ranks, only take part in the update.
    """
    if start.get("strategy") not in _UPDATES_LAST:
        return [step]
    updates = {rank: Times(0.0, 0.0, 0.0, 0.0, times.update) for rank, times in step.items()}
    servers = number(start.get("servers")) or 0
    return [updates, {rank: times._replace(update=0.0) for rank, times in step.items() if rank >= servers} or updates]


def _filling(step: Mapping[int, Times], about: Mapping[int, Mapping[str, Any]], rank: int) -> float:
    """Return the seconds for which the other stages of a pipeline compute. Without stages, return 0.

    A stage waits for a microbatch of each of them, while the pipeline fills and drains.
    """
    own = about.get(rank, {}).get("stage")
    stages: dict[int, list[float]] = defaultdict(list)
    for other, times in step.items():
        if own is not None and (stage := about.get(other, {}).get("stage")) not in (own, None):
            stages[stage].append(times.compute)
    return sum(median(seconds) for seconds in stages.values())


def _lost_at_start(
    first: Sequence[Mapping[int, Times]], steps: Sequence[Mapping[int, Times]]
) -> dict[tuple[str, int | None], float]:
    """Return the seconds by which workers take longer in the first steps than usual: one rank, or all of them.

    The rank for which all others wait has the shortest wait. It loses the time for which even the second to last waits.
    """
    lost: dict[tuple[str, int | None], float] = defaultdict(float)
    ranks = set().union(*steps)
    usual = {
        rank: Times(*map(median, zip(*(step[rank] for step in steps if rank in step), strict=True))) for rank in ranks
    }
    for step in first:
        more = {rank: times.own - usual[rank].own for rank, times in step.items() if rank in usual}
        late = sorted((usual[rank].awaited - step[rank].awaited, rank) for rank in more)
        if len(late) > 1:
            (least, other), (most, rank) = late[-2:]
            lost["start", rank] += min(most - least, step[other].awaited)
            del more[rank]
        lost["start", None] += max(0.0, median(more.values() or [0.0]))
    return defaultdict(float, {key: max(0.0, seconds - _PROBE_SECONDS) for key, seconds in lost.items()})
