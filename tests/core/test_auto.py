"""The synchronous strategy that is faster is found while training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Seconds pass as microbatches are computed: rank 1 needs five times as long for each. A step with all-reduce takes two
# seconds, one with stealing as many as STEALING says.
SCRIPT = """
import os, time
from types import SimpleNamespace
from subjects import CASES, tell
import paceline
from paceline.step.forward import ForwardRunner
from paceline.strategies import auto
from paceline.strategies.data_parallel import allreduce, work_stealing

rank, computing, passed = int(os.environ["RANK"]), 0.0, 0.0
forward_pass = ForwardRunner.forward_pass

def timed_pass(runner, group, *more, **given):
    global computing
    computing += (0.02 if rank == 1 else 0.004) * len(group.microbatches)
    return forward_pass(runner, group, *more, **given)

def timed(step, seconds):
    def timed_step(*given):
        global passed
        passed += seconds
        return step(*given)
    return timed_step

ForwardRunner.forward_pass = timed_pass
allreduce.perf_counter = lambda: computing
work_stealing.time = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: computing)
auto.time = SimpleNamespace(perf_counter=lambda: passed)
auto.AllReduce.step = timed(auto.AllReduce.step, 2.0)
auto.WorkStealing.step = timed(auto.WorkStealing.step, float(os.environ["STEALING"]))

given = CASES["mlp, momentum"]() | {"strategy": "auto", "microbatches": int(os.environ["PARTS"]), "exact": True}
session = paceline.start(**given)
notes = [session.step(batch).notes for batch in session.batches(steps=40)]
tell(fingerprint=session.fingerprint(), notes=notes[-1])
"""

Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def train(printed: Train, tmp_path: Path) -> Train:
    def run(workers: int, *, parts: int = 16, stealing: float = 1.0) -> list[dict[str, Any]]:
        environment = {"PARTS": str(parts), "STEALING": str(stealing), "PACELINE_RUN": str(tmp_path)}
        return printed(SCRIPT, workers, tmp_path, environment=environment)

    return run


def changes(folder: Path) -> list[str]:
    """The strategies that rank 0 went over to."""
    lines = (folder / "events" / "rank-0.jsonl").read_text().splitlines()
    return [event["strategy"] for event in map(json.loads, lines) if event["event"] == "strategy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stealing", "then", "text"),
    [
        (1.0, "stealing", "takes 0.50 times as long as with all-reduce: it stays"),
        (3.0, "allreduce", "takes 1.50 times as long as with all-reduce: back to all-reduce"),
    ],
)
def test_stealing_is_tried_when_one_worker_is_slow(
    train: Train, tmp_path: Path, stealing: float, then: str, text: str
) -> None:
    everyone = train(2, stealing=stealing)
    assert changes(tmp_path) == ["stealing", then]
    (alone,) = train(1)
    for one in everyone:
        assert one["fingerprint"] == alone["fingerprint"]
        tried, ends = one["notes"][-2:]
        assert "computes 1.67 times as long as the mean: trying stealing" in tried
        assert text in ends


def test_too_few_microbatches_are_remarked(train: Train, tmp_path: Path) -> None:
    for one in train(2, parts=3):
        assert "with 8 microbatches or more others could take over from it" in one["notes"][-1]
    assert changes(tmp_path) == ["allreduce"]
