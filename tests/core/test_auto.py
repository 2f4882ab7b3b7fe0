"""The synchronous strategy that is faster is found while training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import os, time
from subjects import CASES, tell
import paceline

given = CASES["mlp, momentum"]() | {"strategy": "auto", "microbatches": int(os.environ["PARTS"]), "exact": True}
loss = given.pop("loss")

def forward(model, microbatch):
    slow = os.environ["SLOW"] == "1" and session.rank == 1
    time.sleep(0.0 if session.workers == 1 else 0.02 if slow else 0.004)
    features, target = microbatch
    return loss(model(features), target)

session = paceline.start(**given, forward=forward)
notes = [session.step(batch).notes for batch in session.batches(steps=40)]
tell(fingerprint=session.fingerprint(), notes=notes[-1])
"""

Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def train(printed: Train, tmp_path: Path) -> Train:
    def run(workers: int, *, slow: bool, parts: int = 16) -> list[dict[str, Any]]:
        environment = {"SLOW": str(int(slow)), "PARTS": str(parts), "PACELINE_RUN": str(tmp_path)}
        return printed(SCRIPT, workers, tmp_path, environment=environment)

    return run


def changes(folder: Path) -> list[str]:
    """The strategies that rank 0 went over to."""
    lines = (folder / "events" / "rank-0.jsonl").read_text().splitlines()
    return [event["strategy"] for event in map(json.loads, lines) if event["event"] == "strategy"]


@pytest.mark.slow
def test_stealing_is_tried_and_stays_when_one_worker_is_slow(train: Train, tmp_path: Path) -> None:
    everyone = train(2, slow=True)
    assert changes(tmp_path)[:2] == ["stealing", "stealing"]
    (alone,) = train(1, slow=False)
    for one in everyone:
        assert one["fingerprint"] == alone["fingerprint"]
        tried, stays = one["notes"][-2:]
        assert "times as long as the mean: trying stealing" in tried
        assert "times as long as with all-reduce: it stays" in stays


def test_too_few_microbatches_are_remarked(train: Train, tmp_path: Path) -> None:
    for one in train(2, slow=True, parts=3):
        assert "with 8 microbatches or more others could take over from it" in one["notes"][-1]
    assert changes(tmp_path) == ["allreduce"]
