"""Who slowed a training down that another tool traced: import of the traces of ByteDance's StragglerAnalysis.

A trace has a row for each operation: worker (``dp_rank``, ``stage``, ``rank``), ``step``, ``optype``, ``start_ts`` and
``duration`` in seconds, microbatch ``mb_id``, and ``gmc``, the place of its part of the model. Computation is timed
again, with the order of each worker and the dependencies between stages, as Lin et al. do (OSDI 2025, arXiv
2505.05713): without any slowness, where every forward or backward pass takes the mean of its step; and without that of
one stage or worker alone. The share that this recovers is what the stage or worker explains. The waits go through
``paceline why``, which has to name the same stage.

    python bench/traces.py ../shared/data/straggler-ST.parquet

Only the columns of computations are kept, 27 bytes a row.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pyarrow.compute
import pyarrow.parquet

from paceline.observe.why import Times, explain

KINDS = "forward-compute", "backward-compute"
COLUMNS = {"step": "i4", "rank": "i2", "stage": "i2", "dp_rank": "i2", "gmc": "i2", "mb_id": "i2"}
ROWS = 1 << 20
Row = tuple[Any, ...]
"""rank, stage, dp_rank, gmc, microbatch, kind, start, duration"""


def read(path: Path) -> Iterator[list[Row]]:
    """Yield the computations of each step, in order of their start."""
    parts: dict[str, list[Any]] = defaultdict(list)
    file = pyarrow.parquet.ParquetFile(path)
    for batch in file.iter_batches(ROWS, columns=[*COLUMNS, "optype", "start_ts", "duration"]):
        names = batch.column("optype").cast("string")
        batch = batch.append_column("kind", pyarrow.compute.index_in(names, pyarrow.array(KINDS)))
        batch = batch.filter(pyarrow.compute.is_valid(batch.column("kind")))
        for name, kind in {**COLUMNS, "kind": "i1", "start_ts": "f8", "duration": "f4"}.items():
            parts[name].append(batch.column(name).to_numpy(zero_copy_only=False).astype(kind))
    columns = {name: numpy.concatenate(parts.pop(name)) for name in list(parts)}
    order = numpy.lexsort((columns["start_ts"], columns["step"]))
    edges = numpy.flatnonzero(numpy.diff(columns["step"][order])) + 1
    names = ("rank", "stage", "dp_rank", "gmc", "mb_id", "kind", "start_ts", "duration")
    for begin, end in zip([0, *edges], [*edges, len(order)], strict=True):
        yield list(zip(*(columns[name][order[begin:end]].tolist() for name in names), strict=True))


def makespan(rows: Sequence[Row], durations: Sequence[float]) -> float:
    """Return the time from the first to the last computation of a step, if each takes this long."""
    last = max(row[3] for row in rows)
    lists: dict[int, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        lists[row[0]].append(place)
    ended: dict[Row, float] = {}
    free, at = dict.fromkeys(lists, 0.0), dict.fromkeys(lists, 0)
    waiting = list(lists)
    while waiting:
        moved = False
        for rank in waiting:
            while at[rank] < len(lists[rank]):
                place = lists[rank][at[rank]]
                _, _, group, chunk, microbatch, kind, _, _ = rows[place]
                if kind == 0:
                    needed = (group, chunk - 1, microbatch, 0) if chunk > 0 else None
                else:
                    needed = (group, chunk + 1, microbatch, 1) if chunk < last else (group, chunk, microbatch, 0)
                if needed is not None and needed not in ended:
                    break
                free[rank] = max(free[rank], ended[needed] if needed else 0.0) + durations[place]
                ended[group, chunk, microbatch, kind] = free[rank]
                at[rank], moved = at[rank] + 1, True
        waiting = [rank for rank in waiting if at[rank] < len(lists[rank])]
        if waiting and not moved:
            raise SystemExit(f"the trace has no step in which ranks {waiting} could go on: operations are missing")
    return max(free.values())


def retimed(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Yield the duration of a step without the slowness of nobody, of all, of each stage and of each worker."""
    means = [numpy.mean([row[7] for row in rows if row[5] == kind]) for kind in (0, 1)]
    yield ("recorded",), makespan(rows, [row[7] for row in rows])
    yield ("ideal",), makespan(rows, [means[row[5]] for row in rows])
    for what, column in (("stage", 1), ("worker", 0)):
        for one in sorted({row[column] for row in rows}):
            yield (what, one), makespan(rows, [means[row[5]] if row[column] == one else row[7] for row in rows])


def times_of(rows: Sequence[Row]) -> dict[int, Times]:
    """Return what each worker computed and awaited in a step."""
    whole = max(row[6] + row[7] for row in rows) - min(row[6] for row in rows)
    computed: dict[int, float] = defaultdict(float)
    for row in rows:
        computed[row[0]] += row[7]
    return {rank: Times(0.0, 0.0, seconds, whole - seconds) for rank, seconds in computed.items()}


def imported(path: Path) -> Mapping[str, Any]:
    """Return the culprits of a trace, and what they explain."""
    totals: dict[Row, float] = defaultdict(float)
    steps, about = list[dict[int, Times]](), dict[int, dict[str, int]]()
    for rows in read(path):
        for what, seconds in retimed(rows):
            totals[what] += seconds
        steps.append(times_of(rows))
        about |= {row[0]: {"stage": row[1]} for row in rows}
    recorded, ideal = totals["recorded",], totals["ideal",]
    explained = {what: (recorded - seconds) / (recorded - ideal) for what, seconds in totals.items() if len(what) == 2}
    stage, worker = (
        max((one for one in explained if one[0] == kind), key=explained.__getitem__) for kind in ("stage", "worker")
    )
    named = explain(steps, about, start={"microbatches": len({row[4] for row in rows})}).culprits[0]
    return {
        "slow-down": recorded / ideal - 1,
        "stage": stage[1],
        "stage explains": explained[stage],
        "worker": worker[1],
        "worker explains": explained[worker],
        "why names": {"kind": named.kind, "rank": named.rank, "stage": named.stage, "share": named.share},
        "steps": len(steps),
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Print what slowed the run of a trace down, beside the answer in a JSON file of the same name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    path = parser.parse_args().trace
    print(json.dumps(imported(path), indent=2))
    if (answer := path.with_suffix(".json")).exists():
        print(json.dumps(json.loads(answer.read_text()).get("answer"), indent=2))


if __name__ == "__main__":
    main()
