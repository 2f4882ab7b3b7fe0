"""Runs of the workers' script under ``paceline run``, and what they wrote down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class RunFailed(Exception):
    """A run did not end well; the text says how."""


@dataclass(frozen=True)
class Record:
    """What the workers of one session wrote down, in the order of ranks."""

    workers: list[dict[str, Any]]
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the time when all were there to the time when all had ended."""
        return float(max(one["end"] for one in self.workers) - self.begin)

    @property
    def begin(self) -> float:
        return float(max(one["begin"] for one in self.workers))

    @property
    def done(self) -> list[float]:
        """When each microbatch was done, in seconds since the beginning."""
        return sorted(moment - self.begin for one in self.workers for moment in one["done"])

    @property
    def fingerprints(self) -> set[str]:
        return {one["fingerprint"] for one in self.workers}

    @property
    def cores(self) -> float:
        """How many cores the workers kept busy."""
        return float(sum(one["cpu"] for one in self.workers) / self.seconds)

    @property
    def machine_cores(self) -> float:
        """Number of busy cores of the machine, including other programs."""
        return float(self.workers[0]["machine"] / self.seconds)


def run(  # noqa: PLR0913 - what a run is made of
    folder: Path,
    name: str,
    sessions: Sequence[Mapping[str, Any]],
    workers: int,
    *,
    script: str = "worker.py",
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    deadline: float = 1800.0,
) -> list[Record]:
    """Run some sessions on the workers, one after the other.

    Raises:
        RunFailed: the run failed. The message has the end of its output.
    """
    home = folder / "records" / name
    home.mkdir(parents=True)
    plan = home / "plan.json"
    plan.write_text(json.dumps({"folder": str(home), "sessions": list(sessions)}))
    words = ["-m", "paceline.cli.main", "run", "-n", str(workers), "--quiet", "--runs-dir", str(folder / "runs")]
    command = [sys.executable, *words, "--name", name, *options, str(HERE / script), str(plan)]
    try:
        ended = subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline,
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{name}: still running after {deadline:.0f} s") from None
    if ended.returncode != 0:
        raise RunFailed(f"{name}: ended with {ended.returncode}\n{ended.stdout[-3000:]}")
    events = list(events_of(folder / "runs" / name / "events"))
    return [Record(_written(home, place), events) for place in range(len(sessions))]


def _written(home: Path, place: int) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in home.glob(f"{place}-*.json")]
    return sorted(found, key=lambda one: one["rank"])


def events_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The records of all workers of a run."""
    for path in sorted(folder.glob("rank-*.jsonl")):
        yield from map(json.loads, path.read_text().splitlines())
