"""Workers that are done take over from those that are not; nothing else changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

# SLOW: seconds that each microbatch of a worker takes more, by rank
SCRIPT = """
import json, os, time
from subjects import CASES, tell
import paceline

slow = json.loads(os.environ["SLOW"])

class Watched:
    def __init__(self, data):
        self.data, self.read = data, []
    def __len__(self):
        return len(self.data)
    def __getitem__(self, place):
        self.read.append(place)
        return self.data[place]

given = CASES[os.environ["CASE"]]() | json.loads(os.environ["GIVEN"])
data = given["data"] = Watched(given["data"])
loss = given.pop("loss")

def forward(model, microbatch):
    time.sleep(slow[session.rank] if session.workers > 1 else 0)
    features, target = microbatch
    return loss(model(features), target)

session = paceline.start(**given, forward=forward)
losses = [session.step(batch).loss.hex() for batch in session.batches(steps=int(os.environ["STEPS"]))]
tell(fingerprint=session.fingerprint(), losses=losses, read=sorted(data.read), position=session.position)
"""


def events_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The records of one kind, of all workers."""
    lines = [line for path in sorted((folder / "events").glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["event"] == name]


@pytest.fixture
def train(printed: Printed, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    def run(
        workers: int, *, slow: list[float] | None = None, case: str = "mlp, momentum", steps: int = 8, **given: Any
    ) -> list[dict[str, Any]]:
        one_machine = given.pop("one_machine", True)
        return printed(
            SCRIPT,
            workers,
            tmp_path,
            one_machine=one_machine,
            environment={
                "SLOW": json.dumps(slow or [0] * workers),
                "CASE": case,
                "STEPS": str(steps),
                "GIVEN": json.dumps({"strategy": "stealing", "microbatches": 16, "batch": 64} | given),
                "PACELINE_RUN": str(tmp_path),
            },
        )

    return run


Train = Callable[..., list[dict[str, Any]]]


@pytest.mark.sampled(1)
@pytest.mark.crossed
@pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
@pytest.mark.parametrize("case", ["mlp, momentum", "batch norm, dropout, short batch"])
def test_the_bits_are_those_of_one_process(train: Train, tmp_path: Path, case: str, one_machine: bool) -> None:
    slow = [0.002, 0.03, 0.002]
    everyone = train(3, slow=slow, case=case, exact=True, one_machine=one_machine)
    steals = events_of(tmp_path, "steal")
    (alone,) = train(1, case=case, exact=True)
    for one in everyone:
        assert (one["fingerprint"], one["losses"]) == (alone["fingerprint"], alone["losses"])
    assert {steal["share"] for steal in steals} >= {1}
    assert all(steal["rank"] != steal["share"] for steal in steals if not steal["again"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
def test_each_sample_is_computed_once(train: Train, tmp_path: Path, one_machine: bool) -> None:
    """But for those of microbatches that were not back in time."""
    everyone = train(3, slow=[0.01, 0.06, 0.01], steps=8, one_machine=one_machine, audit="off")
    read = [sample for one in everyone for sample in one["read"]]
    again = sum(steal["again"] for steal in events_of(tmp_path, "steal"))
    assert len(everyone[0]["read"]) > len(everyone[1]["read"])  # the slow one has done less
    assert len(read) == 2 * 256 + 4 * (again + 3)  # 8 steps of 64 are two epochs; each tries a microbatch of 4 first
    assert set(read) == set(range(256)) and min(map(read.count, range(256))) == 2


@pytest.mark.slow
def test_shares_follow_the_speed(train: Train, tmp_path: Path) -> None:
    train(2, slow=[0.01, 0.06], steps=8)
    counts = [event["counts"] for event in events_of(tmp_path, "shares")]
    assert counts and all(fast > slow for fast, slow in counts)


@pytest.mark.slow
def test_even_shares_stay_even(train: Train, tmp_path: Path) -> None:
    train(2, slow=[0.01, 0.06], steps=8, shares="even")
    assert events_of(tmp_path, "shares") == []
    stolen = [event["share"] for event in events_of(tmp_path, "steal") if not event["again"]]
    assert stolen.count(1) > 4 * stolen.count(0)  # on a busy machine the fast one may be the slow one for a while


@pytest.mark.slow
def test_shares_that_processes_load_ahead(train: Train) -> None:
    """What was loaded for shares that have changed since does no harm."""
    first, second = train(2, slow=[0.002, 0.01], steps=8, workers_per_loader=1, exact=True)
    (alone,) = train(1, exact=True)
    assert first["fingerprint"] == second["fingerprint"] == alone["fingerprint"]


# rank 1 does not give back the first microbatch of its own share until another one has computed it, too
STUCK = """
import time
from subjects import CASES, tell
import paceline
from paceline.comm.assignment.leases import Leases

given = CASES["batch norm, dropout, short batch"]() | {"strategy": "stealing", "microbatches": 8, "exact": True}
loss = given.pop("loss")
lease, stuck, next_lease = None, [], Leases.next

def noted(leases):
    global lease
    lease = next_lease(leases)
    return lease

def forward(model, microbatch):
    time.sleep(0.02 if session.workers > 1 else 0)
    if lease is not None and session.rank == lease.share == 1 and not lease.again and not stuck:
        stuck[:] = session.position, lease.microbatch
        until = time.monotonic() + 30
        while not session._loop.strategy._leases.overtaken(lease.microbatch):
            assert time.monotonic() < until
            time.sleep(0.005)
    features, target = microbatch
    return loss(model(features), target)

Leases.next = noted
session = paceline.start(**given, forward=forward)
for batch in session.batches(steps=6):
    session.step(batch)
tell(fingerprint=session.fingerprint(), stuck=stuck)
"""


def test_a_microbatch_that_is_not_back_is_computed_again(printed: Printed, tmp_path: Path) -> None:
    everyone = printed(STUCK, 3, tmp_path, environment={"PACELINE_RUN": str(tmp_path)})
    again = [event for event in events_of(tmp_path, "steal") if event["again"]]
    (alone,) = printed(STUCK, 1, tmp_path)
    assert [one["fingerprint"] for one in everyone] == [alone["fingerprint"]] * 3
    assert len(everyone[1]["stuck"]) == 2
    assert any(event["rank"] != 1 and [event["step"], event["microbatch"]] == everyone[1]["stuck"] for event in again)


def test_a_parameter_that_some_microbatches_do_not_use(train: Train) -> None:
    first, second = train(2, slow=[0.0, 0.01], case="layer used sometimes", exact=True)
    (alone,) = train(1, case="layer used sometimes", exact=True)
    assert first["fingerprint"] == second["fingerprint"] == alone["fingerprint"]


def test_too_few_microbatches_are_remarked(printed: Printed, tmp_path: Path) -> None:
    script = """
from subjects import CASES, tell
import paceline
session = paceline.start(**CASES["mlp, momentum"]() | {"strategy": "stealing"})
for batch in session.batches(steps=1):
    tell(notes=session.step(batch).notes)
"""
    for one in printed(script, 3, tmp_path):
        assert (
            "8 microbatches for 3 workers leave little to take over: set microbatches to 12 or more" in one["notes"][-1]
        )
