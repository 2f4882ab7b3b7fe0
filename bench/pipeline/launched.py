"""Runs the workers of a part under ``paceline run``, and reads what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.schedule.pipeline.clock import Span
from paceline.schedule.pipeline.operations import Kind, Operation

HERE = Path(__file__).resolve().parent


class RunFailed(Exception):
    """A run failed; the text says how."""


@dataclass(frozen=True)
class Run:
    """What each worker returned, in the order of ranks, and the events of all."""

    results: list[Any]
    events: list[dict[str, Any]]


def run(folder: Path, part: str, workers: int, given: dict[str, Any], deadline: float = 900.0) -> Run:
    """Run the workers of a part.

    Raises:
        RunFailed: with the end of its output.
    """
    name = f"{part}-{len(list(folder.iterdir()))}"
    home = folder / name
    home.mkdir(parents=True)
    (home / "given.json").write_text(json.dumps(given))
    words = ["-m", "paceline.cli.main", "run", "-n", str(workers), "--quiet", "--runs-dir", str(home), "--name", "run"]
    command = [sys.executable, *words, str(HERE / "worker.py"), part, str(home)]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{part}: still running after {deadline:.0f} s") from None
    if ended.returncode != 0:
        raise RunFailed(f"{part}: ended with {ended.returncode}\n{ended.stdout[-3000:]}")
    return Run(results_of(home, workers), events_of(home / "run" / "events"))


def results_of(home: Path, workers: int) -> list[Any]:
    """What the workers wrote."""
    return [json.loads((home / f"result-{rank}.json").read_text()) for rank in range(workers)]


def events_of(folder: Path) -> list[dict[str, Any]]:
    """The events of all workers of a run, ordered for each worker."""
    return [json.loads(line) for path in sorted(folder.glob("rank-*.jsonl")) for line in path.read_text().splitlines()]


def span_of(event: dict[str, Any]) -> Span | None:
    """Return the operation of an event with its times in seconds since 1970, or None if it is not an operation."""
    kind = Kind.__members__.get(event["event"].upper())
    if kind is None or "stage" not in event:
        return None
    operation = Operation(
        kind, event["stage"], event.get("microbatch", -1), event.get("version", 0), event.get("peer", -1)
    )
    return Span(operation, event["time"] - event["seconds"], event["time"])
