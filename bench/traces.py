"""Stragglers in training that another tool traced: import of the traces of ByteDance's StragglerAnalysis.

A trace has a row for each operation of a step: its worker (``dp_rank``, ``stage``, ``rank``), its kind (``optype``) and
number of that kind (``seq_id``), ``start_ts`` and ``duration`` in seconds, the microbatch ``mb_id``, and the part of
the model, in the stage (``mc``) and in the whole (``gmc``). Steps are timed again, with the order of each worker and
what each operation waits for, as Lin et al. do (OSDI 2025, arXiv 2505.05713): as recorded; ideally, where operations
take the mean of their kind, or the median if they communicate; and ideally for one stage, or for the slowest 3 % of the
workers, only. The share of the slowdown that this removes is what the stage or the workers explain. Waits of an
operation for others count for neither. ``paceline why`` has to name the same stage from the times of the passes.

    python bench/traces.py ../shared/data/straggler-ST.parquet

A row takes 35 bytes of memory.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pyarrow.parquet

from paceline.observe.why.culprits import Times, explain

FORWARD, BACKWARD = "forward-compute", "backward-compute"
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
ENDS, CLIP = "embedding-grads-all-reduce", "optimizer-clip-main-grad"
COMPUTING = FORWARD, BACKWARD, "gc", "optimizer"
NORMS = "layernorm-grads-all-reduce"
OF_REPLICAS = GATHER, SCATTER, SEPARATE, CLIP
"""Operations in which all replicas of a stage take part."""
RECEIVED = {FORWARD: "forward-recv", BACKWARD: "backward-recv"}
INTEGERS = "stage", "seq_id", "dp_rank", "rank", "mc", "gmc", "mb_id"
COLUMNS = {"step": "i4", **dict.fromkeys(INTEGERS, "i2"), "start_ts": "f8", "duration": "f8"}
ROWS, CLOCK_ERROR, SLOWEST = 1 << 20, 5e-4, 0.03
Worker = tuple[int, int]
"""Stage and replica."""
Key = tuple[int, str, int]
"""Stage, kind and number of an operation."""
Seconds = Mapping[Key, Any]
"""Of each operation, in an array of steps by replicas."""


class Trace(NamedTuple):
    """Operations of the steps."""

    begins: Seconds  # since the begin of the step
    durations: Seconds
    parts: Mapping[Key, Sequence[int]]  # mc, gmc and microbatch
    ranks: Mapping[int, Sequence[int]]  # of each replica, by stage


def read(path: Path) -> Trace:
    """Read the steps of a trace that have all operations."""
    pieces: dict[str, list[Any]] = defaultdict(list)
    kinds: dict[str, int] = {}
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(ROWS, columns=[*COLUMNS, "optype"]):
        for name, kind in COLUMNS.items():
            pieces[name].append(batch.column(name).fill_null(-1).to_numpy(zero_copy_only=False).astype(kind))
        names = batch.column("optype").cast("string").to_pylist()
        pieces["kind"].append(numpy.array([kinds.setdefault(one, len(kinds)) for one in names], "i1"))
    rows = {name: numpy.concatenate(pieces.pop(name)) for name in list(pieces)}
    steps, counts = numpy.unique(rows["step"], return_counts=True)
    whole = steps[counts == Counter(counts.tolist()).most_common(1)[0][0]]
    order = numpy.lexsort([rows[name] for name in ("dp_rank", "step", "seq_id", "kind", "stage")])
    order = order[numpy.isin(rows["step"][order], whole)]
    shape = -1, len(whole), int(rows["dp_rank"].max()) + 1
    if len(order) % (shape[1] * shape[2]):
        raise SystemExit(f"{path} has replicas with different operations, which cannot be compared")
    rows = {name: values[order].reshape(shape) for name, values in rows.items()}
    if any((rows[name] != rows[name][:, :1, :1]).any() for name in ("stage", "kind", "seq_id")):
        raise SystemExit(f"{path} has steps with different operations, which cannot be compared")
    begins = rows["start_ts"] - rows["start_ts"].min(axis=(0, 2))[:, None]
    names = list(kinds)
    first = numpy.stack([rows[name][:, 0, 0] for name in ("stage", "kind", "seq_id", "mc", "gmc", "mb_id")], 1).tolist()
    keys = [(stage, names[kind], number) for stage, kind, number, *_ in first]
    return Trace(
        begins=dict(zip(keys, begins, strict=True)),
        durations=dict(zip(keys, rows["duration"], strict=True)),
        parts={key: one[3:] for key, one in zip(keys, first, strict=True)},
        ranks={key[0]: row[0].tolist() for key, row in zip(keys, rows["rank"], strict=True)},
    )


class Steps:
    """Steps of a trace that can be timed again.

    The first replica of the first step tells which operations an operation follows::

        gather ── forward ── forward ── backward ── ... ── backward ── gc ── ends ── scatter ── clip ── optimizer
                    │ receive  ▲ receive  ▲ receive          └─ scatter, if it is beside the others ─┘
        other stage ▼          │          │
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, stages = trace, sorted(trace.ranks)
        keys = sorted(trace.begins, key=lambda key: float(trace.begins[key][0, 0]))
        self._needs: dict[Key, list[Key]] = {key: [] for key in keys}
        self._of: dict[tuple[int, str], list[Key]] = defaultdict(list)  # in the order of their begin
        for key in keys:
            self._of[key[:2]].append(key)
        for stage in stages:
            self._follow_stage(stage)
        self._follow_passes()
        groups: dict[Key, tuple[Key, ...]] = {key: (key,) for key in keys}
        for together in (
            self._of[stages[0], ENDS] + self._of[stages[-1], ENDS],
            [key for key in keys if key[1] == CLIP],
        ):
            groups |= dict.fromkeys(together, tuple(dict.fromkeys(together)))
        graph = {group: [groups[one] for key in group for one in self._needs[key]] for group in groups.values()}
        self._order = list(TopologicalSorter(graph).static_order())
        ends = {key: begins + trace.durations[key] for key, begins in trace.begins.items()}
        self.own = {
            key: trace.durations[key]
            if key[1] in COMPUTING
            else numpy.maximum(0.0, ends[key] - self._met(group, ends, [trace.begins[one] for one in group]))
            for key, group in groups.items()
        }
        kinds: dict[str, list[Any]] = defaultdict(list)
        for (_, kind, _), seconds in self.own.items():
            kinds[kind].append(seconds)
        usual = {kind: (numpy.mean if kind in COMPUTING else numpy.median)(every) for kind, every in kinds.items()}
        self.ideal = {key: numpy.broadcast_to(usual[key[1]], seconds.shape) for key, seconds in self.own.items()}

    def _follow(self, *keys: Key) -> None:
        for before, key in pairwise(keys):
            self._needs[key].append(before)

    def _follow_stage(self, stage: int) -> None:
        """Note which operations of a stage follow each other."""
        of = {kind: keys for (one, kind), keys in self._of.items() if one == stage}
        scatters, norms = of.get(SCATTER, []), of.get(NORMS, [])
        lasting = ["gc", NORMS, ENDS, SEPARATE, *([] if SEPARATE in of else [SCATTER]), CLIP, "optimizer"]
        passes = [key for key in self._needs if key[0] == stage and key[1] in RECEIVED]
        self._follow(*passes, *(key for kind in lasting for key in of.get(kind, ())))
        for kind in (*RECEIVED.values(), GATHER):
            self._follow(*of.get(kind, ()))
        for gather in of.get(GATHER, ()):
            self._follow(gather, *self._of_part(of[FORWARD], gather)[:1])
        if SEPARATE in of:
            self._follow(*scatters, *norms[:1])
            for scatter in scatters:
                self._follow(*self._of_part(of[BACKWARD], scatter)[-1:], scatter)

    def _of_part(self, keys: Sequence[Key], other: Key) -> list[Key]:
        return [key for key in keys if self.trace.parts[key][0] == self.trace.parts[other][0]]

    def _follow_passes(self) -> None:
        """Note for which pass of another part of the model each pass waits, and in which receive."""
        passes = {(key[1], *self.trace.parts[key][1:]): key for key in self._needs if key[1] in RECEIVED}
        last, receives = max(chunk for _, chunk, _ in passes), dict[Key, Key]()
        for (stage, kind), keys in [*self._of.items()]:
            if kind in RECEIVED:  # without a receive for the first pass, or with one for none, after the last
                begun = self.trace.begins[keys[-1]][0, 0] + CLOCK_ERROR
                found = [one for one in self._of[stage, RECEIVED[kind]] if self.trace.begins[one][0, 0] <= begun]
                receives |= zip(reversed(keys), reversed(found), strict=False)
        for (kind, chunk, microbatch), key in passes.items():
            before = (kind, chunk - 1) if kind == FORWARD else (FORWARD, last) if chunk == last else (kind, chunk + 1)
            if (other := passes.get((*before, microbatch))) is not None:
                self._follow(other, *([receives[key]] if other[0] != key[0] and key in receives else []), key)

    def _met(self, group: Sequence[Key], ended: Seconds, begins: Sequence[Any] = ()) -> Any:
        """Return when all that take part in an operation can begin it."""
        every = [*begins, *(ended[one] for key in group for one in self._needs[key])]
        met = numpy.maximum.reduce(every) if every else numpy.zeros((1, 1))
        return met.max(axis=1, keepdims=True) if group[0][1] in OF_REPLICAS else met

    def time(self, seconds: Seconds) -> float:
        """Return the mean duration of a step in which operations take this long, without their waits for others."""
        ended: dict[Key, Any] = {}
        for group in self._order:
            met = self._met(group, ended)
            ended |= {key: met + seconds[key] for key in group}
        return float(numpy.maximum.reduce([ended[key] for key in ended if key[1] in COMPUTING]).max(axis=1).mean())

    def replaced(self, seconds: Seconds, by: Seconds, workers: Collection[Worker]) -> float:
        """Return the duration of a step in which the operations of some workers take other times."""
        chosen = {
            stage: [(stage, one) in workers for one in range(len(ranks))] for stage, ranks in self.trace.ranks.items()
        }
        return self.time({key: numpy.where(chosen[key[0]], by[key], one) for key, one in seconds.items()})

    def slowest(self, workers: Sequence[Worker]) -> list[Worker]:
        """Return the workers whose stage and whose replica slow an ideal step down most."""
        stages, replicas = (
            {one: self.replaced(self.ideal, self.own, [it for it in workers if it[column] == one]) for one in every}
            for column, every in enumerate(map(set, zip(*workers, strict=True)))
        )
        score = {one: min(stages[one[0]], replicas[one[1]]) for one in workers}
        return sorted(workers, key=lambda one: (-score[one], one[1]))[: math.ceil(SLOWEST * len(workers))]

    def times(self) -> list[dict[int, Times]]:
        """Return what each worker computed and awaited in each step."""
        passes = [key for key in self.own if key[1] in RECEIVED]
        ends = numpy.maximum.reduce([self.trace.begins[key] + self.trace.durations[key] for key in passes]).max(axis=1)
        whole = ends - numpy.minimum.reduce([self.trace.begins[key] for key in passes]).min(axis=1)
        found: list[dict[int, Times]] = [{} for _ in whole]
        for stage, ranks in self.trace.ranks.items():
            computed = numpy.sum([self.own[key] for key in passes if key[0] == stage], axis=0)
            for step, seconds in enumerate(computed):
                for rank, own in zip(ranks, seconds.tolist(), strict=True):
                    found[step][rank] = Times(0.0, 0.0, own, float(whole[step]) - own)
        return found


def imported(path: Path) -> Mapping[str, Any]:
    """Return the culprits of a trace, and what they explain."""
    steps = Steps(trace := read(path))
    recorded, ideal = steps.time(steps.own), steps.time(steps.ideal)

    def explained(workers: Collection[Worker]) -> float:
        return (recorded - steps.replaced(steps.own, steps.ideal, workers)) / (recorded - ideal)

    workers = [(stage, one) for stage, ranks in trace.ranks.items() for one in range(len(ranks))]
    stages = {stage: explained([one for one in workers if one[0] == stage]) for stage in trace.ranks}
    stage, slowest = max(stages, key=stages.__getitem__), steps.slowest(workers)
    about = {rank: {"stage": stage} for stage, ranks in trace.ranks.items() for rank in ranks}
    microbatches = len({part[2] for key, part in trace.parts.items() if key[1] == FORWARD})
    named = explain(steps.times(), about, start={"microbatches": microbatches}).culprits[:1]
    return {
        "slow-down": recorded / ideal - 1,
        "step seconds as recorded": recorded,
        "without any straggling": ideal,
        "stage": stage,
        "stage explains": stages[stage],
        "worker": trace.ranks[slowest[0][0]][slowest[0][1]],
        "worker explains": explained(slowest),
        "why names": {name: getattr(one, name) for one in named for name in ("kind", "rank", "stage", "share")},
        "steps": len(steps.times()),
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
