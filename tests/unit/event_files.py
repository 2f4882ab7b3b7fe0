"""Event files of runs that never were: what a clock says, written as workers write it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.schedule.pipeline.clock import Timeline, Times
from paceline.schedule.pipeline.operations import Kind

HOUR = 1_000_000.0
"""When these runs begin."""
TWO = [["a", "b"], ["c"]]
UNEVEN = Times((1.0, 2.0), (0.0, 1.0), (2.0, 1.0), (1.0,), (0.0, 0.0), (0.0, 0.0))
STREAM = Times((1.0, 1.0), (0.0, 1.0), (2.0, 1.0), (0.0,), (0.0, 0.0), (1.0, 1.0))


def slower(times: Times, factor: float) -> Times:
    return Times(*(tuple(factor * one for one in values) for values in vars(times).values()))


def mark(run: Path, rank: int, event: str, time: float, generation: int = 0, **fields: Any) -> None:
    """One record."""
    path = run / "events" / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        head = {"time": HOUR + time, "event": event, "rank": rank, "generation": generation}
        file.write(json.dumps({**head, **fields}) + "\n")


def mark_cut(run: Path, stages: list[list[str]], time: float = -1.0, generation: int = 0, **given: Any) -> None:
    """The model is cut: by default for one worker for each stage, and 3 microbatches."""
    usual = {"times": None, "again": False, "workers": len(stages), "microbatches": 3, "pipeline": {}}
    mark(run, 0, "cut", time, generation, stages=stages, **{**usual, **given})


def mark_step(run: Path, workers: int, step: int, end: float, seconds: float = 1.0, generation: int = 0) -> None:
    """All workers have finished a step."""
    for rank in range(workers):
        mark(run, rank, "step", end, generation, step=step, seconds=seconds, loss=0.5)


def mark_timeline(run: Path, timeline: Timeline, begin: float, step: int, size: int, generation: int = 0) -> None:
    """The operations of a timeline; ``size`` microbatches are a step, the first one of them is ``step``.

    Sums are recorded as something else, and so are the updates of a pipeline that runs empty.
    """
    streamed = max(span.operation.microbatch for spans in timeline.workers for span in spans) >= size
    for rank, spans in enumerate(timeline.workers):
        for (kind, stage, microbatch, version, peer), left, right in spans:
            if kind is Kind.REDUCE or (kind is Kind.UPDATE and not streamed):
                continue
            more: dict[str, Any] = {"peer": peer, "bytes": 8} if peer >= 0 else {"version": version}
            if microbatch >= 0:
                more |= {"step": step + microbatch // size, "microbatch": microbatch % size}
            name = kind.name.lower()
            mark(run, rank, name, begin + right, generation, stage=stage, seconds=right - left, **more)


def mark_whole(run: Path, timeline: Timeline, step: int, begin: float, size: int, generation: int = 0) -> None:
    """A step of a pipeline that runs empty, which all workers have finished."""
    mark_timeline(run, timeline, begin, step, size, generation)
    workers, seconds = len(timeline.workers), timeline.seconds
    mark_step(run, workers, step, begin + seconds + 0.5, seconds + 0.5, generation)


def change(run: Path, rank: int, of: dict[str, Any], to: Callable[[Any], Any]) -> None:
    """Each record of a rank that has some fields is another one, or none."""
    path = run / "events" / f"rank-{rank}.jsonl"
    told = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [to(one) if of.items() <= one.items() else one for one in told]
    assert changed != told
    path.write_text("".join(json.dumps(one) + "\n" for one in changed if one is not None))
