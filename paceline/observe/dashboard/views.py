"""Data of each view of the dashboard, as JSON values. Each view reads sums over ranges of steps, or the newest records.

::

    view         from                            shows
    summary      starts, batches, last steps     where the run is, and where its time goes
    series       cells of steps, metrics         loss, metrics and duration of a step
    stages       cells of all events             what a step consists of
    heat         cells of steps                  own time of each rank, over the steps
    waits        late                            which rank waited for which
    membership   events of the membership        workers that joined or were lost
    memory       events ``usage``, ``memory``    memory of the workers, and what was predicted for each rank
    network      cells of messages               bytes of a step
    logs         search                          newest matching records
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from paceline.errors import ConfigError
from paceline.observe.cells import Cells
from paceline.observe.index import RecordIndex, Search
from paceline.observe.records import Record, number
from paceline.observe.why.culprits import Findings
from paceline.observe.why.text import sentences

Data: TypeAlias = dict[str, Any]

MOST_RANKS = 256  # Most rows of the heat map. More ranks share a row, which shows the slowest of them.
_MOST_POINTS = 2000
_MOST_RECORDS = 200
_MOST_PAIRS = 40
_MOST_EVENTS = 500
_SILENT_SECONDS = 30.0  # smallest age of the newest step that the page shows
_STEP = ("load", "compute", "wait", "between")  # parts of a step that every synchronous run records
_OPERATIONS = (
    "forward", "backward", "input", "weight", "encode", "exchange", "spread", "send", "receive", "update", "outer-step",
    "evaluate", "checkpoint", "map",
)  # fmt: skip
_MESSAGES = ("exchange", "spread", "send", "receive", "encode-send", "encode-receive")
_MEMBERSHIP = (
    "membership", "lost", "gathered", "recovered", "went back", "departure", "resume", "checkpoint-failed", "end",
)  # fmt: skip
_SAVES = ("checkpoint",)
_MOST_SAVES = 50
_HEATS = {"own": "seconds - MIN(awaited, seconds)", "load": "waited", "wait": "awaited", "step": "seconds"}
"""Quantities of the heat map, as expressions over a cell."""


def summary(index: RecordIndex, findings: Findings, now: float | None = None) -> Data:
    """Return where a run is: its steps, its workers, its settings, and where the time of its last steps went.

    Args:
        findings: result of :func:`paceline.observe.why.at_end.find_at_end`.
        now: seconds since 1970. Defaults to the time of the call.
    """
    cells = index.cells()
    start = _newest(index, "start") or {}
    batches = _newest(index, "batches") or {}
    ended = _newest(index, "end")
    if ended is not None and ended["time"] < start.get("time", 0.0):
        ended = None  # the run was resumed since
    first, last = cells.rows("SELECT MIN(first), MAX(last) FROM cells WHERE event = 'step'")[0]
    steps = cells.rows("SELECT MAX(step) FROM written WHERE event = 'step'")[0][0]
    latest = last or start.get("time")
    age = None if latest is None else max(0.0, (time.time() if now is None else now) - latest)
    return {
        "steps": 0 if steps is None else steps + 1,
        "of": batches.get("steps"),
        "workers": start.get("workers"),
        "strategy": start.get("strategy"),
        "host": start.get("host"),
        "seconds": None if last is None else last - first,
        "age": age,
        "silent": age is not None and age > _SILENT_SECONDS,
        "end": None if ended is None else ended.get("reason"),
        "settings": _settings(start),
        "lost": cells.rows("SELECT COUNT(*) FROM written WHERE event = 'lost'")[0][0],
        "sentences": sentences(findings) if findings.steps else [],
    }


def series(index: RecordIndex) -> Data:
    """Return loss and duration of a step over the steps, and the metrics that the script has recorded."""
    cells = index.cells()
    rows = cells.rows(
        "SELECT range, SUM(loss) / NULLIF(SUM(losses), 0), SUM(seconds) / SUM(count), MAX(seconds / count) "
        "FROM cells WHERE event = 'step' GROUP BY range ORDER BY range"
    )
    points: dict[str, list[list[float]]] = {}
    query = "SELECT step, record FROM written WHERE event IN ('evaluation', 'metrics') AND step >= 0 AND rank = 0"
    for step, text in cells.rows(f"{query} ORDER BY step, id"):  # every rank records the same
        for name, value in _numbers(json.loads(text).get("metrics")).items():
            values = points.setdefault(name, [])
            if values and values[-1][0] == step:
                values.pop()  # the step was repeated
            values.append([step, value])
    return {
        "width": cells.width,
        "steps": [(one * cells.width) for one, *_ in rows],
        "loss": [loss for _, loss, *_ in rows],
        "seconds": [mean for _, _, mean, _ in rows],
        "slowest": [most for *_, most in rows],
        "metrics": {name: values[:: len(values) // _MOST_POINTS + 1] for name, values in sorted(points.items())},
    }


def stages(index: RecordIndex) -> Data:
    """Return the parts of a step in seconds, on average over the ranks, and the recorded operations of a step."""
    cells = index.cells()
    steps = cells.rows(
        "SELECT range, SUM(count), SUM(seconds), SUM(waited), SUM(awaited), MAX(last), MIN(first), MAX(count), "
        "SUM(seconds) / SUM(count) FROM cells WHERE event = 'step' GROUP BY range ORDER BY range"
    )
    pauses = _pauses(cells)
    found: dict[str, list[float | None]] = {name: [] for name in _STEP}
    before: float | None = None
    for _, count, seconds, waited, awaited, last, first, most, mean in steps:
        load, wait = waited / count, min(awaited / count, max(0.0, (seconds - waited) / count))
        begin = first if before is None else before
        paused = sum(max(0.0, min(last, until) - max(begin, since)) for since, until in pauses)
        wall = (last - begin - paused) / (most if before is not None else max(1, most - 1))
        before = last
        for name, value in zip(_STEP, (load, mean - load - wait, wait, max(0.0, wall - mean)), strict=True):
            found[name].append(max(0.0, value))
    counts = {place: count for place, count, *_ in steps}
    return {
        "width": cells.width,
        "steps": [one * cells.width for one in counts],
        "parts": found,
        "operations": _per_step(cells, "seconds", _OPERATIONS, counts),
    }


def _pauses(cells: Cells) -> list[tuple[float, float]]:
    """Return the times between the last step of a launch and the start of the next one."""
    starts = cells.rows("SELECT time FROM written WHERE event = 'start' AND rank = 0 ORDER BY time")
    last = "SELECT time FROM written WHERE event = 'step' AND time < ? ORDER BY time DESC LIMIT 1"
    return [(since, until) for (until,) in starts[1:] for (since,) in cells.rows(last, until)]


def _per_step(cells: Cells, column: str, events: Sequence[str], counts: Mapping[int, int]) -> Data:
    """Return the sum of a column over the records of each event, divided by the steps in each range."""
    marks = ", ".join("?" * len(events))
    query = f"SELECT event, range, SUM({column}) FROM cells WHERE event IN ({marks}) AND {column} > 0 GROUP BY 1, 2"
    found: dict[str, dict[int, float]] = {}
    for event, place, total in cells.rows(query, *events):
        if place in counts:
            found.setdefault(event, {})[place] = total / counts[place]
    return {name: [found[name].get(one) for one in counts] for name in events if name in found}


def heat(index: RecordIndex, what: str = "own") -> Data:
    """Return a quantity of a step for each rank and range of steps, in seconds.

    Args:
        what: ``own`` time (without waits for others), ``load`` (waiting for data), ``wait`` (for others), ``step``.
    """
    if what not in _HEATS:
        raise ConfigError(f"what = {what!r} is none of {', '.join(_HEATS)}.")
    cells = index.cells()
    most = cells.rows("SELECT COALESCE(MAX(rank), -1) FROM cells WHERE event = 'step'")[0][0] + 1
    together = -(-most // MOST_RANKS) or 1
    ranges = [one for (one,) in cells.rows("SELECT DISTINCT range FROM cells WHERE event = 'step' ORDER BY range")]
    places = {one: place for place, one in enumerate(ranges)}
    rows: list[list[float | None]] = [[None] * len(ranges) for _ in range(-(-most // together))]
    query = f"SELECT rank, range, ({_HEATS[what]}) / count FROM cells WHERE event = 'step' AND rank >= 0"
    for rank, place, seconds in cells.rows(query):
        row, at = rows[rank // together], places[place]
        if (known := row[at]) is None or known < seconds:
            row[at] = seconds
    rows = [[None if value is None else round(value, 6) for value in row] for row in rows]
    return {"width": cells.width, "together": together, "steps": [one * cells.width for one in ranges], "rows": rows}


def waits(index: RecordIndex) -> Data:
    """Return how long ranks have waited for others, the longest first, and how often a rank was the last."""
    cells = index.cells()
    pairs = cells.rows("SELECT rank, late, seconds, count FROM late ORDER BY seconds DESC LIMIT ?", _MOST_PAIRS)
    by_late = "SELECT late, SUM(seconds), SUM(count) FROM late GROUP BY late ORDER BY 2 DESC LIMIT ?"
    late = cells.rows(by_late, _MOST_PAIRS)
    return {
        "pairs": [dict(zip(("rank", "for", "seconds", "steps"), pair, strict=True)) for pair in pairs],
        "late": [dict(zip(("rank", "seconds", "steps"), one, strict=True)) for one in late],
    }


def membership(index: RecordIndex) -> Data:
    """Return the events of the membership and of checkpoints by their times, and the number of workers."""
    records = [
        *index.newest(Search(events=_MEMBERSHIP), _MOST_EVENTS),
        *index.newest(Search(events=_SAVES), _MOST_SAVES),
    ]
    lines = [{"time": one["time"], "event": one["event"], "text": _text_of(one)} for one in records]
    sizes = [[one["time"], len(one["workers"])] for one in records if one["event"] == "membership" and _is_list(one)]
    return {"events": sorted(lines, key=lambda one: one["time"]), "workers": sorted(sizes)}


def memory(index: RecordIndex) -> Data:
    """Return the memory of the workers over the steps, and the prediction for each rank, in bytes."""
    found: dict[int, Data] = {}
    for record in reversed(index.newest(Search(events=("memory",)), 4 * _MOST_EVENTS)):
        if isinstance(rank := record["rank"], int):
            given = {name: record[name] for name in ("limit", "predicted", "reached") if name in record}
            found.setdefault(rank, {"rank": rank}).update(_numbers(given))
    cells = index.cells()
    rows = cells.rows(
        "SELECT range, AVG(bytes / count), MAX(bytes / count) FROM cells WHERE event = 'usage' GROUP BY 1 ORDER BY 1"
    )
    return {
        "ranks": [found[rank] for rank in sorted(found)],
        "steps": [place * cells.width for place, *_ in rows],
        "mean": [mean for _, mean, _ in rows],
        "most": [most for *_, most in rows],
    }


def network(index: RecordIndex) -> Data:
    """Return the bytes that a worker sent in a step, on average, by the event that records them."""
    cells = index.cells()
    counts = dict(cells.rows("SELECT range, SUM(count) FROM cells WHERE event = 'step' GROUP BY 1 ORDER BY 1"))
    return {
        "width": cells.width,
        "steps": [one * cells.width for one in counts],
        "bytes": _per_step(cells, "bytes", _MESSAGES, counts),
    }


def logs(index: RecordIndex, search: Search) -> Data:
    """Return the newest records that match, at most 200."""
    return {"records": index.newest(search, _MOST_RECORDS), "most": _MOST_RECORDS}


def metrics(runs: Mapping[str, Mapping[str, float]]) -> str:
    """Return the state of some runs in the text format of Prometheus.

    Args:
        runs: :func:`state` of each run, by its name.
    """
    kinds = {
        "steps_total": ("counter", "Steps that rank 0 has completed."),
        "loss": ("gauge", "Loss of the newest step."),
        "step_seconds": ("gauge", "Duration of the newest step on rank 0."),
        "workers": ("gauge", "Workers that train."),
        "lost_workers_total": ("counter", "Workers that were lost."),
        "checkpoint_step": ("gauge", "Step of the newest checkpoint."),
        "last_record_timestamp_seconds": ("gauge", "Time of the newest step, in seconds since 1970."),
    }
    values: dict[str, list[str]] = {name: [] for name in kinds}
    for name, found in runs.items():
        label = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for metric, value in found.items():
            values[metric].append(f'paceline_{metric}{{run="{label}"}} {value}')
    lines: list[str] = []
    for name, (kind, text) in kinds.items():
        lines += [f"# HELP paceline_{name} {text}", f"# TYPE paceline_{name} {kind}", *values[name]]
    return "\n".join(lines) + "\n"


def state(index: RecordIndex) -> dict[str, float]:
    """Return the values of a run for :func:`metrics`."""
    step = next(iter(index.newest(Search(ranks=("0",), events=("step",)), 1)), {})
    start = _newest(index, "start") or {}
    sizes = membership(index)["workers"]
    saved = _newest(index, "checkpoint") or {}
    done = _numbers({"steps_total": step.get("step"), "loss": step.get("loss"), "step_seconds": step.get("seconds")})
    workers = sizes[-1][1] if sizes else start.get("workers")
    lost = index.cells().rows("SELECT COUNT(*) FROM written WHERE event = 'lost'")[0][0]
    return {
        **({"steps_total": done.pop("steps_total") + 1} if "steps_total" in done else {}),
        **{name: value for name, value in done.items() if name != "steps_total"},
        "lost_workers_total": lost,
        **_numbers({"workers": workers, "checkpoint_step": saved.get("step")}),
        **_numbers({"last_record_timestamp_seconds": step.get("time")}),
    }


VIEWS: Mapping[str, Callable[[RecordIndex], Data]] = {
    "series": series,
    "stages": stages,
    "waits": waits,
    "membership": membership,
    "memory": memory,
    "network": network,
}
"""Views that need nothing but the index."""


def _newest(index: RecordIndex, event: str) -> Record | None:
    return next(iter(index.newest(Search(events=(event,)), 1)), None)


def _settings(start: Record) -> dict[str, str]:
    given = start.get("settings")
    return {str(key): str(value) for key, value in given.items()} if isinstance(given, dict) else {}


def _numbers(values: object) -> dict[str, float]:
    """Return the entries of a mapping that are finite numbers."""
    if not isinstance(values, dict):
        return {}
    return {str(name): found for name, value in values.items() if (found := number(value)) is not None}


def _is_list(record: Record) -> bool:
    return isinstance(record.get("workers"), list)


def _text_of(record: Record) -> str:
    """Return a line that describes a record of the membership."""
    event = record["event"]
    if event == "membership" and _is_list(record):
        joined, gone = (record.get(name) or "none" for name in ("joined", "gone"))
        return f"generation {record['generation']}: {len(record['workers'])} workers, joined {joined}, gone {gone}"
    fields = ("step", "reason", "path", "seconds", "joined", "lost", "steps")
    found = {name: record[name] for name in fields if record.get(name) not in (None, "", [])}
    short = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in found.items()}
    given = ", ".join(f"{name} {value}" for name, value in short.items())
    return f"rank {record['rank']}: {given}" if isinstance(record["rank"], int) else given
