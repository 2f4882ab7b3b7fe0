"""Trace of a run: what each worker did, as slices on tracks, with instants, counters and flows between workers.

::

    rank 0   steps      ├── step 7 ───────────────────────────┤├── step 8 ──
             compute    ├ forward ┤├ backward ┤
             send                 ├ send ┤
                                     ╲ flow
    rank 1   receive                  ├ receive ┤

A record with ``seconds`` is a slice that ends at its time; any other record is an instant. Slices on a track lie beside
or inside each other. Slices of a kind that overlap otherwise, such as exchanges of buckets, get several tracks.

A receive ends after its send began. If the error of two clocks hides that, the receive ends later in the trace, and its
field ``moved`` has the seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.observe.records import Record, number

_KINDS = {
    "step": "steps",
    **dict.fromkeys(("forward", "backward", "input", "weight", "update", "audit", "encode"), "compute"),
    **dict.fromkeys(("exchange", "spread", "outer-step"), "exchange"),
    **dict.fromkeys(("send", "encode-send"), "send"),
    **dict.fromkeys(("receive", "encode-receive"), "receive"),
    **dict.fromkeys(("checkpoint", "checkpoint-part"), "checkpoints"),
}
"""Track of each event. Events that are not listed are on the track ``events``."""
_COUNTERS = {
    "step": ("loss", "samples_per_second", "learning_rate"),
    "memory": ("reached",),
    "usage": ("bytes", "cores"),
}
_COMMON = ("time", "event", "rank", "generation", "seconds")
NANOSECONDS = 1e9


@dataclass(frozen=True)
class Slice:
    """Operation of a worker, with times in nanoseconds since 1970."""

    name: str
    begin: int
    end: int
    values: Mapping[str, Any]  # other fields of the record
    sends: int | None = None  # number of the flow that begins here
    receives: int | None = None  # number of the flow that ends here


@dataclass(frozen=True)
class Instant:
    """Event without a duration."""

    name: str
    time: int
    values: Mapping[str, Any]


@dataclass
class Worker:
    """Tracks of a worker, or of another process such as the launcher."""

    tracks: dict[str, list[Slice]] = field(default_factory=dict)  # slices by name of their track
    instants: list[Instant] = field(default_factory=list)
    counters: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))  # times and values


def workers_of(records: Iterable[Record], profiled: Iterable[tuple[int, str, Slice]] = ()) -> dict[str, Worker]:
    """Return the tracks of each worker, by its rank or by the name of the process.

    Args:
        profiled: rank, track and slice of operators and kernels. Defaults to none.
    """
    known = list(records)
    flows, moved = _flows(known)
    workers: dict[str, Worker] = defaultdict(Worker)
    slices: dict[tuple[str, str], list[Slice]] = defaultdict(list)
    for record in known:
        worker = f"rank {record['rank']}" if isinstance(record["rank"], int) else record["rank"]
        end, name = round(record["time"] * NANOSECONDS), _name(record)
        values = {key: value for key, value in record.items() if key not in _COMMON}
        for counter in _COUNTERS.get(record["event"], ()):
            if (value := number(record.get(counter))) is not None:
                workers[worker].counters[counter].append((end, value))
        if (seconds := number(record.get("seconds"))) is None or seconds < 0:
            workers[worker].instants.append(Instant(name, end, values))
            continue
        flow = {"sends" if record["event"] == "send" else "receives": flows.get(id(record))}
        begin = end - round(seconds * NANOSECONDS)
        if (by := moved.get(id(record))) is not None:
            end, values = end + round(by * NANOSECONDS), values | {"moved": by}
        found = Slice(name, begin, end, values, **flow)
        slices[worker, _KINDS.get(record["event"], "events")].append(found)
    for rank, track_name, one in profiled:
        slices[f"rank {rank}", track_name].append(one)
    for (worker, kind), some in sorted(slices.items()):
        for place, track in enumerate(apart(some)):
            workers[worker].tracks[f"{kind} {place + 1}" if place else kind] = track
    return dict(sorted(workers.items()))


def _name(record: Record) -> str:
    """Return the name of a slice: the event, with its step, stage or bucket if it has one."""
    event: str = record["event"]
    if event == "step":
        return f"step {record.get('step')}"
    for key in ("what", "bucket", "stage", "microbatch"):
        if key in record:
            event += f" {record[key]}" if key in ("what", "bucket") else f" {key} {record[key]}"
    return event


def apart(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Distribute slices to tracks so that any two slices on a track are nested or disjoint.

    >>> first, second, inside = Slice("a", 0, 4, {}), Slice("b", 2, 6, {}), Slice("c", 1, 3, {})
    >>> [[one.name for one in track] for track in apart([first, second, inside])]
    [['a', 'c'], ['b']]
    """
    tracks: list[list[Slice]] = []
    every: list[list[int]] = []  # ends of the slices of each track that have not ended, the innermost last
    for one in sorted(slices, key=lambda one: (one.begin, -one.end)):
        for ends in every:
            while ends and ends[-1] <= one.begin:
                ends.pop()
        place = next((place for place, ends in enumerate(every) if not ends or ends[-1] >= one.end), len(every))
        if place == len(every):
            tracks.append([])
            every.append([])
        tracks[place].append(one)
        every[place].append(one.end)
    return tracks


def _flows(records: Iterable[Record]) -> tuple[dict[int, int], dict[int, float]]:
    """Return the number of the flow of each send and receive, by identity, if both of its records exist.

    Also return the seconds by which a receive must end later, by identity, if it ends before its send begins.
    """
    ends: dict[tuple[Any, ...], dict[str, list[Record]]] = defaultdict(lambda: {"send": [], "receive": []})
    for record in records:
        if record["event"] in ("send", "receive"):
            way = ("stage", "peer") if record["event"] == "send" else ("peer", "stage")
            key = tuple(repr(record.get(name)) for name in ("step", "microbatch", *way))
            ends[key][record["event"]].append(record)
    pairs = [one for one in ends.values() if len(one["send"]) == len(one["receive"]) == 1]
    flows = {id(record): count for count, pair in enumerate(pairs, 1) for (record,) in pair.values()}
    late = {}
    for pair in pairs:
        (send,), (receive,) = pair["send"], pair["receive"]
        if (by := send["time"] - (number(send.get("seconds")) or 0.0) - receive["time"]) > 0:
            late[id(receive)] = by
    return flows, late
