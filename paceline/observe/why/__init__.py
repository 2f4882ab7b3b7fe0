"""Where the time of a run went, from its records."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from paceline.observe import noise
from paceline.observe.records import Record, number
from paceline.observe.why.advice import CROWDED, Cores
from paceline.observe.why.culprits import Findings, explain
from paceline.observe.why.links import Links, SlowLink, slow_link
from paceline.observe.why.times import Times

_FIRST_STEPS = 3  # steps at the start of longer runs that are looked at by themselves, because they probe and warm up
_PAUSES = {"checkpoint": "stall", **dict.fromkeys(("weights", "evaluate", "predict", "map", "extend"), "seconds")}
"""Pauses between steps by the event that records them, with the field of their duration."""
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
    link = _slow_link(links)
    delayed = median([one.delayed for one in cores.values()] or [0.0])
    latency = min((number(one.get("seconds")) or 0.0 for one in few["latency"]), default=None)
    start = {**start, "latency": latency, "crowded": delayed >= CROWDED, "delayed": delayed}
    rest = dict([*taken.items()][len(first) :])
    outer = {step for one in few["outer-step"] if type(step := one.get("step")) is int}
    starts = [*_starts(few["gathered"]), *first]
    found = explain(_periods(rest, outer), about, longest, start, link, starts if whole else [])
    return replace(found, steps=found.steps and len(rest), noise=norms.scale(), delayed=round(delayed, 4))


def _starts(gathered: Iterable[Record]) -> list[dict[int, Times]]:
    """Return the seconds that each rank waited for later starts, launch by launch, as if each were a step."""
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


def _slow_link(links: Mapping[int, Links]) -> SlowLink | None:
    """Return the slow link of the generation with the longest waits, as if it had taken its share of all waits."""
    sums = {generation: sum(waits.values()) for generation, waits in links.items()}
    if not sums:
        return None
    most = max(sums, key=sums.__getitem__)
    link = slow_link(links[most])
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
    waits: dict[tuple[int, int], Links] = defaultdict(dict)
    calls: dict[tuple[int, int], list[float]] = defaultdict(list)  # durations of the script's collective calls
    ended: dict[tuple[int, int], float] = {}  # times by rank and generation: a recovery is part of no step
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
        several = record.get("links", [record.get("link")])  # of older versions only one
        for link in several if isinstance(several, list) else ():
            match link:
                case [int(sender), wait] if (late := number(wait)) is not None:
                    waits[generation, step][sender, rank] = late
    for key, step in found.items():
        least = min(calls[key])  # even the last rank to arrive waits for the calls themselves
        for rank, times in step.items():
            step[rank] = times._replace(script=times.script + least, awaited=max(0.0, times.awaited - least))
    found = dict(sorted(found.items()))
    _add_links(links, found, waits)
    return found


def _add_links(
    links: dict[int, Links],
    steps: Mapping[tuple[int, int], Mapping[int, Times]],
    waits: Mapping[tuple[int, int], Links],
) -> None:
    """Add the waits of receivers for their links, given their waits in each step."""
    own: dict[int, float] = defaultdict(float)  # since the last exchange
    before = -1
    for key, step in steps.items():
        if key[0] != before:
            own.clear()
        before = key[0]
        for rank, times in step.items():
            own[rank] += times.own
        for (sender, rank), late in waits.get(key, {}).items():  # a sender that computes for longer is not a slow link
            late = max(0.0, late - max(0.0, own.get(sender, math.inf) - own[rank]))
            known = links[key[0]]
            known[sender, rank] = known.get((sender, rank), 0.0) + late
        if waits.get(key):
            own.clear()
