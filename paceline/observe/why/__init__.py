"""Where the time of a run went: the worker, the stage or the part of a step that takes more than it has to.

The workers of a synchronous step begin it one after the other and end it together. So in each step the slowest worker
is the one with the most time of its own, and what it takes beyond the median of the others is lost by all::

    rank 0   ▒ load ▓ compute ░░░░░░░ awaits others ║        own time = time since the last step - awaits others
    rank 1   ▒ load ▓ compute ░░░░░░░░░░░░░░░░░░░░░ ║
    rank 2   ▒ load ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ compute ░░░ ║        rank 2 takes the excess; what it awaits is the exchange
                              ◄──── excess ────►

No clock is compared with that of another machine: only durations are. After StageFrontier (arXiv 2606.06751).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from paceline.observe import noise
from paceline.observe.records import Record, number
from paceline.observe.why.advice import CROWDED, Advice, Cores, advise
from paceline.observe.why.links import Links, SlowLink, slow_link
from paceline.observe.why.times import Times

_FIRST_STEPS = 3  # steps at the start of longer runs that are looked at by themselves, because they probe and warm up
LEAST_SHARE = 0.02  # smallest share of the time that is worth a sentence
_PROBE_SECONDS = 1.0
"""Time that probes may take in the first steps of any run. A rank that is always slow is slow there, too."""
_OF_LINK = 0.25
"""Least share of the exchange in which workers wait for a slow link. Records tell of its first half, the sums, only."""
_UPDATES_LAST = ("parameter-server", "sharded")  # strategies in which all workers wait for the update of each
_PAUSES = {"checkpoint": "stall", **dict.fromkeys(("weights", "evaluate", "predict", "map", "extend"), "seconds")}
"""Pauses between steps by the event that tells of them, with the field of their duration."""
_OF_RANK_0 = ("checkpoint", "weights")  # pauses in which rank 0 writes for all
EVENTS = (
    "start",
    "step",
    "cut",
    "latency",
    "outer-step",
    "gathered",
    noise.EVENT,
    *_PAUSES,
)  # events from which the findings follow
STAGES = """
SELECT rank, min(json_extract(record, '$.stage')) FROM records
WHERE event = 'forward' AND typeof(rank) = 'integer' GROUP BY rank
"""
"""Query for the first stage of each rank of a pipeline."""


@dataclass(frozen=True)
class Culprit:
    """Part of the time that would be saved if the rank or the part of a step took no longer than it has to."""

    kind: str  # "compute", "update", "load", "script", "start", a pause, or "exchange" if it is a link
    share: float  # of the time of the run
    rank: int | None = None
    host: str | None = None
    stage: int | None = None  # of a pipeline
    layer: str | None = None  # layers of the stage, such as ``blocks.2 to blocks.5``
    sender: int | None = None  # of a slow link, whose slow end is the rank. None if data of all senders come slowly
    receiver: int | None = None  # of a slow link. None if the data come slowly to all receivers


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


def find(records: Iterable[Record], stages: Mapping[int, int] | None = None, whole: bool = True) -> Findings:
    """Return where the time of a run went.

    Args:
        records: records of the events ``EVENTS``, in the order in which each worker wrote them.
        stages: first stage of each rank of a pipeline. Defaults to none.
        whole: whether the records begin where the run began.
    """
    about: dict[Any, dict[str, Any]] = defaultdict(dict, {rank: {"stage": one} for rank, one in (stages or {}).items()})
    pauses: dict[str, dict[Any, float]] = {event: defaultdict(float) for event in _PAUSES}
    start: Record = {}
    layers: list[str] = []
    few: dict[str, list[Record]] = {"latency": [], "outer-step": [], "gathered": []}
    cores: dict[Any, Cores] = defaultdict(Cores)
    norms = noise.NoiseRecords()

    def noted() -> Iterator[Record]:
        nonlocal start, layers
        for record in records:
            event, rank = record["event"], record["rank"]
            if event == "start":
                host, start = record.get("host"), record
                about[rank]["host"] = host if isinstance(host, str) else None
            elif event == "cut":
                layers = _layers(record)
            elif event in few:
                few[event].append(record)
            elif event == "step":
                cores[rank].add(record)
            elif event in _PAUSES:
                pauses[event][rank] += number(record.get(_PAUSES[event])) or 0.0
            norms.add(record)
            yield record

    links: dict[int, Links] = defaultdict(dict)
    taken = _steps(noted(), links)
    steps = [*taken.values()]
    for one in about.values():
        if (stage := one.get("stage")) is not None and stage < len(layers):
            one["layer"] = layers[stage]
    longest = {event: max(seconds.values(), default=0.0) for event, seconds in pauses.items()}
    first = steps[:_FIRST_STEPS] if len(steps) > 3 * _FIRST_STEPS else []
    link = _slow_link(links, taken)
    delayed = median([one.delayed for one in cores.values()] or [0.0])
    latency = min((number(one.get("seconds")) or 0.0 for one in few["latency"]), default=None)
    start = {**start, "latency": latency, "crowded": delayed >= CROWDED, "delayed": delayed}
    rest = dict([*taken.items()][len(first) :])
    outer = {step for one in few["outer-step"] if type(step := one.get("step")) is int}
    starts = [*_starts(few["gathered"]), *first]
    found = explain(_periods(rest, outer), about, longest, start, link, starts if whole else [])
    return replace(found, steps=found.steps and len(rest), noise=norms.scale(), delayed=round(delayed, 4))


def _starts(gathered: Iterable[Record]) -> list[dict[int, Times]]:
    """Return how long each rank waited for those that started later, launch by launch, as if that was a step."""
    launches: dict[Any, list[Times]] = defaultdict(list)
    for record in gathered:
        launches[record["rank"]].append(Times(0.0, 0.0, 0.0, number(record.get("seconds")) or 0.0))
    longest = max(map(len, launches.values()), default=0)
    return [{rank: waits[at] for rank, waits in launches.items() if at < len(waits)} for at in range(longest)]


def _periods(
    steps: Mapping[tuple[int, int], Mapping[int, Times]], outer: Collection[object]
) -> list[Mapping[int, Times]]:
    """Return the durations of the steps between two outer steps together, because workers wait for others only there.

    Without outer steps, return those of each step.
    """
    found: list[Mapping[int, Times]] = []
    period: list[Mapping[int, Times]] = []
    for (_, number_of_step), step in steps.items():
        period.append(step)
        if not outer or number_of_step in outer:
            ranks = set(step).intersection(*period)
            found.append({rank: Times(*map(sum, zip(*(one[rank] for one in period), strict=True))) for rank in ranks})
            period = []
    return [step for step in found if step] or [*steps.values()]


def _slow_link(links: Mapping[int, Links], steps: Mapping[tuple[int, int], Mapping[int, Times]]) -> SlowLink | None:
    """Return the slow link of the generation with the longest waits, as if it had taken its share of all waits."""
    sums = {generation: sum(waits.values()) for generation, waits in links.items()}
    if not sums:
        return None
    most = max(sums, key=sums.__getitem__)
    link = slow_link(links[most], {rank for (one, _), ranks in steps.items() if one == most for rank in ranks})
    return link and link._replace(seconds=link.seconds * sum(sums.values()) / sums[most])


def _layers(cut: Record) -> list[str]:
    """Return the layers of each stage as text."""
    stages = cut.get("stages")
    valid = isinstance(stages, list) and all(isinstance(one, list) and one for one in stages)
    return [f"{one[0]} to {one[-1]}" if len(one) > 1 else str(one[0]) for one in stages] if valid else []  # type: ignore[union-attr]


def _steps(records: Iterable[Record], links: dict[int, Links]) -> dict[tuple[int, int], dict[int, Times]]:
    """Return the durations of each step by rank, by generation and number of the step.

    Also add up for how long each receiver waits for each sender, by generation, because ranks change with it.
    """
    found: dict[tuple[int, int], dict[int, Times]] = defaultdict(dict)
    waits: dict[tuple[int, int], dict[int, tuple[int, float]]] = defaultdict(dict)
    calls: dict[tuple[int, int], list[float]] = defaultdict(list)  # what the script's collective calls take
    ended: dict[tuple[int, int], float] = {}  # times by rank and generation; what a recovery takes is of no step
    for record in records:
        rank, generation, time = record["rank"], record["generation"], record["time"]
        if record["event"] == "start":  # maybe of a resumed run
            ended = {key: at for key, at in ended.items() if key[0] != rank}
        step, values = record.get("step"), [number(record.get(name)) for name in ("seconds", "waited", "awaited")]
        if record["event"] != "step" or type(step) is not int or None in values:
            continue
        seconds, load, awaited = (max(0.0, value or 0.0) for value in values)
        more = [number(record.get(name)) for name in ("between", "awaited_between", "update")]
        if None in more:  # of an older version
            more = [time - seconds - ended.get((rank, generation), time - seconds), awaited - seconds + load, 0.0]
        between, beside, update = (max(0.0, value or 0.0) for value in more)
        between = between if (rank, generation) in ended else 0.0
        ended[rank, generation] = time
        busy = max(0.0, seconds - load - max(0.0, awaited - beside))
        update = min(update, busy)
        found[generation, step][rank] = Times(max(0.0, between - beside), load, busy - update, awaited, update)
        calls[generation, step].append(beside)
        match record.get("link"):
            case [int(sender), wait] if (late := number(wait)) is not None:
                waits[generation, step][rank] = sender, late
    for key, step in found.items():
        least = min(calls[key])  # even who comes last waits for the calls themselves
        for rank, times in step.items():
            step[rank] = times._replace(script=times.script + least, awaited=max(0.0, times.awaited - least))
    found = dict(sorted(found.items()))
    _add_links(links, found, waits)
    return found


def _add_links(
    links: dict[int, Links],
    steps: Mapping[tuple[int, int], Mapping[int, Times]],
    waits: Mapping[tuple[int, int], Mapping[int, tuple[int, float]]],
) -> None:
    """Add for how long receivers wait for their links, given the sender and the seconds that each waits in a step."""
    own: dict[int, float] = defaultdict(float)  # since the last exchange
    before = -1
    for key, step in steps.items():
        if key[0] != before:
            own.clear()
        before = key[0]
        for rank, times in step.items():
            own[rank] += times.own
        for rank, (sender, late) in waits.get(key, {}).items():  # a sender that computes for longer is no slow link
            late = max(0.0, late - max(0.0, own.get(sender, math.inf) - own[rank]))
            known = links[key[0]]
            known[sender, rank] = known.get((sender, rank), 0.0) + late
        if waits.get(key):
            own.clear()


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
    of_ranks: dict[str, float] = defaultdict(float)  # workers that are slow in turn count together
    shares: dict[str, float] = defaultdict(float)  # of the time without the start, which no setting changes
    for one in culprits:
        of_ranks[one.kind] += one.share if one.rank is not None else 0.0
        shares[one.kind] += one.share * total / training
    culprits.sort(key=lambda one: (-(one.share if one.rank is None else of_ranks[one.kind]), -one.share))
    fixed = not pauses.get("map") and not pauses.get("extend")
    advice = advise(shares, start, steps, len(steps) / training, LEAST_SHARE, fixed)
    return Findings(len(steps), total, culprits, advice)


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
    """Return the seconds by which workers take longer in the first steps than usually: one rank, or all of them.

    The rank for which all others wait waits least. It loses the time for which even the last but one waits for it.
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
