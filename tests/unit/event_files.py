"""Event files of runs that never were."""

import json
from pathlib import Path
from typing import Any

HOUR = 1_000_000.0
"""When these runs begin."""


def mark(run: Path, rank: int, event: str, time: float, generation: int = 0, **fields: Any) -> None:
    """One record."""
    path = run / "events" / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        head = {"time": HOUR + time, "event": event, "rank": rank, "generation": generation}
        file.write(json.dumps({**head, **fields}) + "\n")


def mark_step(run: Path, workers: int, step: int, end: float, seconds: float = 1.0, generation: int = 0) -> None:
    """All workers have finished a step."""
    for rank in range(workers):
        mark(run, rank, "step", end, generation, step=step, seconds=seconds, loss=0.5)
