"""Workers that are done take over from those that are not; nothing else changes."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

# LATE: the rank that keeps its first microbatch of a step until the others have taken all that are free, or -1
# SPENT: seconds that a microbatch takes by the clock from which shares are made, by rank
SCRIPT = """
import json, os, time
from types import SimpleNamespace
from subjects import CASES, tell
import paceline
from paceline.comm.assignment.leases import Leases, StoreLeases
from paceline.strategies.data_parallel import work_stealing

late, spent, until = int(os.environ["LATE"]), json.loads(os.environ["SPENT"]), os.environ["UNTIL"]
rank, clock, kept = int(os.environ["RANK"]), 0.0, None
work_stealing.time = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: clock)

class Watched:
    def __init__(self, data):
        self.data, self.read = data, []
    def __len__(self):
        return len(self.data)
    def __getitem__(self, place):
        self.read.append(place)
        return self.data[place]

def are_free(leases):
    if isinstance(leases, Leases):
        return any(tail > head for head, tail in zip(leases._head, leases._tail))
    return any(leases._add("taken", place, 0) < len(pool.microbatches) for place, pool in enumerate(leases._pools))

def watch(kind, next_lease, finish):
    def noted(leases):
        global kept
        lease = next_lease(leases)
        time.sleep(0.002)
        if rank == late and lease is not None and kept != session.position:
            kept = session.position
            while are_free(leases):
                time.sleep(0.002)
        return lease
    def finished(leases, microbatch):
        global clock
        clock += spent[rank]
        return finish(leases, microbatch)
    kind.next, kind.finish = noted, finished

watch(Leases, Leases.next, Leases.finish)
watch(StoreLeases, StoreLeases.next, StoreLeases.finish)
given = CASES[os.environ["CASE"]]() | json.loads(os.environ["GIVEN"])
data = given["data"] = Watched(given["data"])
session = paceline.start(**given)
losses = []
for batch in session.batches(steps=int(os.environ["STEPS"])):
    losses.append(session.step(batch).loss.hex())
    pace = session._loop.strategy._pace if session.workers > 1 else None
    if until == "fitted" and len({*pace.counts}) > 1 or until == "measured" and min(map(len, pace._measured)) > 5:
        break
tell(fingerprint=session.fingerprint(), losses=losses, read=sorted(data.read), position=session.position)
"""


def events_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The records of one kind, of all workers."""
    lines = [line for path in sorted((folder / "events").glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["event"] == name]


@pytest.fixture
def train(printed: Printed, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    def run(
        workers: int,
        *,
        late: int = -1,
        spent: Sequence[float] = (0.01,) * 3,
        case: str = "mlp, momentum",
        steps: int = 8,
        until: str = "",
        **given: Any,
    ) -> list[dict[str, Any]]:
        one_machine = given.pop("one_machine", True)
        return printed(
            SCRIPT,
            workers,
            tmp_path,
            one_machine=one_machine,
            environment={
                "LATE": str(late),
                "SPENT": json.dumps(spent),
                "CASE": case,
                "STEPS": str(steps),
                "UNTIL": until,
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
    everyone = train(3, late=1, case=case, exact=True, one_machine=one_machine)
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
    everyone = train(3, late=1, steps=8, one_machine=one_machine, audit="off")
    read = [sample for one in everyone for sample in one["read"]]
    again = [steal["rank"] for steal in events_of(tmp_path, "steal") if steal["again"]]
    # The late worker has tried a microbatch of 4, and keeps at most one in a step while the others take the rest.
    assert len(everyone[1]["read"]) <= 4 * (1 + 8 + again.count(1)) < 8 * 64 / 3
    assert len(read) == 2 * 256 + 4 * (len(again) + 3)  # 8 steps of 64 are two epochs; each tries a microbatch first
    assert set(read) == set(range(256)) and min(map(read.count, range(256))) == 2


@pytest.mark.slow
def test_shares_follow_the_speed(train: Train, tmp_path: Path) -> None:
    """A worker without a result has not been measured in that step, so it may take more steps than usual."""
    train(2, spent=[0.01, 0.06], steps=400, until="fitted")
    assert [event["counts"] for event in events_of(tmp_path, "shares")] == [[14, 2]] * 2


@pytest.mark.slow
def test_even_shares_stay_even(train: Train, tmp_path: Path) -> None:
    train(2, late=1, spent=[0.01, 0.06], steps=8, shares="even")
    stolen = [(event["step"], event["share"]) for event in events_of(tmp_path, "steal") if not event["again"]]
    for step in range(8):  # a worker that begins when all are taken does not keep one
        assert stolen.count((step, 1)) in (7, 8)
    assert {share for _, share in stolen} == {1}
    train(2, spent=[0.01, 0.06], steps=400, until="measured", shares="even")
    assert events_of(tmp_path, "shares") == []


@pytest.mark.slow
def test_shares_that_processes_load_ahead(train: Train) -> None:
    """What was loaded for shares that have changed since does no harm."""
    first, second = train(2, spent=[0.01, 0.06], steps=8, workers_per_loader=1, exact=True)
    (alone,) = train(1, exact=True)
    assert first["fingerprint"] == second["fingerprint"] == alone["fingerprint"]


# Rank 1 does not give back the first microbatch of its own share until another one has computed it, too. The others
# begin when it has that microbatch.
STUCK = """
import time
from pathlib import Path
import peers
from subjects import CASES, tell
import paceline
from paceline.comm.assignment.leases import Leases

given = CASES["batch norm, dropout, short batch"]() | {"strategy": "stealing", "microbatches": 8, "exact": True}
loss = given.pop("loss")
lease, stuck, next_lease = None, [], Leases.next
begun = Path(__file__).with_name("begun")

def noted(leases):
    global lease
    lease = next_lease(leases)
    return lease

def forward(model, microbatch):
    if lease is not None and session.rank == lease.share == 1 and not lease.again and not stuck:
        stuck[:] = session.position, lease.microbatch
        begun.touch()
        peers.until(lambda: session._loop.strategy._leases.overtaken(lease.microbatch))
    elif lease is not None and session.workers > 1:
        peers.until(begun.exists)
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
    first, second = train(2, late=1, case="layer used sometimes", exact=True)
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
