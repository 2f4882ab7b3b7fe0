"""Each microbatch goes back through the weights that it came through, and the weights are as old as the paper says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Printed = Callable[..., list[dict[str, Any]]]


class Case(NamedTuple):
    """An asynchronous pipeline of a model of ``pipedream_reference``.

    ``lags``, ``every``: of the stages, by hand. ``version``: the weights of a stage for a microbatch m, in Python.
    ``runs``: the steps between two moments when the pipeline runs empty; ``batch``: samples, microbatches, of which
    there are 60 samples in all. ``late``: updates after which tied weights come back.
    """

    workers: int
    settings: dict[str, Any]
    cut: list[int]
    lags: list[int]
    every: int
    runs: list[list[int]]
    version: str = "max(0, m - lags[stage]) // every"
    model: str = "layers"
    batch: tuple[int, int] = (20, 5)
    late: int = 0


CASES = {
    "an update after each microbatch": Case(
        3, {"schedule": "pipedream", "update_every": 1}, [2, 5], [2, 1, 0], 1, [[0, 1, 2, 3]]
    ),
    "an update for each batch": Case(3, {"schedule": "pipedream"}, [2, 5], [2, 1, 0], 5, [[0, 1, 2, 3]]),
    "updates that do not meet the batches": Case(
        2, {"schedule": "pipedream", "update_every": 2}, [4], [1, 0], 2, [[0, 1, 2]]
    ),
    "a divisor of the batch": Case(
        2, {"schedule": "pipedream", "update_every": 3}, [3], [1, 0], 3, [[0, 1, 2, 3]], batch=(24, 6)
    ),
    "fewer microbatches than workers": Case(
        3, {"schedule": "pipedream"}, [2, 5], [2, 1, 0], 2, [[0, 1, 2, 3]], batch=(20, 2)
    ),
    "one microbatch": Case(3, {"schedule": "pipedream"}, [2, 5], [2, 1, 0], 1, [[0, 1, 2, 3]], batch=(20, 1)),
    "vertical sync": Case(
        3,
        {"schedule": "pipedream", "update_every": 1, "vertical_sync": True},
        [2, 5],
        [2, 1, 0],
        1,
        [[0, 1, 2, 3]],
        version="max(0, m - 2)",
    ),
    "2bw": Case(
        3, {"schedule": "2bw", "update_every": 3}, [2, 5], [2, 1, 0], 3, [[0, 1, 2, 3]], version="max(0, m // 3 - 1)"
    ),
    "2bw, fewer microbatches than workers": Case(
        3,
        {"schedule": "2bw", "update_every": 3},
        [2, 5],
        [2, 1, 0],
        3,
        [[0, 1, 2, 3]],
        version="max(0, m // 3 - 1)",
        batch=(20, 2),
    ),
    "run empty every two steps": Case(
        2, {"schedule": "pipedream", "update_every": 1, "flush_every": 2}, [5], [1, 0], 1, [[0, 1], [2, 3], [4]]
    ),
    # Of 60 samples in batches of 32 the second one has 28: 7 microbatches after 8.
    "short batches": Case(
        2, {"schedule": "pipedream", "update_every": 4}, [5], [1, 0], 4, [[0, 1, 2, 3]], batch=(32, 8)
    ),
    "two workers for the first stage": Case(
        3,
        {"schedule": "pipedream", "update_every": 2, "replicas": [2, 1]},
        [5],
        [2, 0],
        2,
        [[0, 1, 2, 3]],
        batch=(24, 4),
    ),
    "two workers for each stage": Case(
        4,
        {"schedule": "pipedream", "update_every": 4, "replicas": [2, 2]},
        [5],
        [2, 0],
        4,
        [[0, 1, 2]],
        batch=(24, 4),
    ),
    # 12 of 60 samples are left, 3 microbatches of 8: then it would be the other worker's turn, so it runs empty.
    "two workers, and an odd number of microbatches": Case(
        3,
        {"schedule": "pipedream", "update_every": 2, "replicas": [2, 1]},
        [5],
        [2, 0],
        2,
        [[0, 1], [2, 3]],
        batch=(32, 8),
    ),
    "tied weights": Case(
        3,
        {"schedule": "pipedream", "update_every": 1},
        [2, 4],
        [2, 1, 0],
        1,
        [[0, 1, 2, 3]],
        model="tied",
        late=1,
    ),
    "tied weights, far away": Case(
        3, {"schedule": "pipedream", "update_every": 1}, [2, 3], [2, 1, 0], 1, [[0, 1, 2, 3]], model="tied", late=2
    ),
    "tied weights, two microbatches an update, run empty": Case(
        2,
        {"schedule": "pipedream", "update_every": 2, "flush_every": 2},
        [3],
        [1, 0],
        2,
        [[0, 1], [2, 3]],
        model="tied",
        late=1,
    ),
    "tied weights, 2bw": Case(
        3,
        {"schedule": "2bw", "update_every": 3},
        [2, 3],
        [2, 1, 0],
        3,
        [[0, 1, 2, 3]],
        version="max(0, m // 3 - 1)",
        model="tied",
        late=1,
    ),
}
NETWORK = [name for name, case in CASES.items() if case.workers == 3]
SCRIPT = """
import json, os, threading
import pipedream_reference
from paceline.strategies.pipeline.weight_stash import WeightStash
from subjects import tell

most, update = [0], WeightStash.update
def watched(self, oldest):
    most[0] = max(most[0], len(self))
    return update(self, oldest)
WeightStash.update = watched

for name, case in json.loads(os.environ["CASES"]).items():
    workers, settings, cut, lags, every, runs, formula, model, (batch, count), late = case
    given = 60, batch, count
    cuts = [str(place) for place in cut]
    made = getattr(pipedream_reference, model)()
    by_hands = [
        pipedream_reference.ByHand(
            made, cut, lags, every, eval("lambda stage, m: " + formula, {"lags": lags, "every": every}), newest, late
        )
        for newest in (False, True)
        if os.environ["RANK"] == "0"
    ]
    most[0] = 0
    session = pipedream_reference.trained(made, *given, sum(map(len, runs)), cut=cuts, **settings)
    for one in by_hands:
        for run in runs:
            one.until_empty(pipedream_reference.microbatches(*given, run))
    tell(**{name: {
        "distances": [one.farthest_from(made) for one in by_hands],
        "weights": [value.double().norm().item().hex() for value in made.state_dict().values()],
        "fingerprint": session.fingerprint(),
        "versions": most[0],
        "logs": [one.name for one in threading.enumerate()].count("paceline-events"),
    }})
"""


@pytest.fixture(scope="module")
def results(
    chosen: Callable[[str], set[str]], printed: Printed, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[list[dict[str, Any]], Path]]:
    known: dict[tuple[str, ...], tuple[list[dict[str, Any]], Path]] = {}
    failed: set[tuple[str, ...]] = set()

    def of(name: str, one_machine: bool = True) -> tuple[list[dict[str, Any]], Path]:
        """All cases with as many workers run at once; over the network, the chosen ones."""
        workers = CASES[name].workers
        alike = [other for other, case in CASES.items() if case.workers == workers]
        together = alike if one_machine else [other for other in NETWORK if other in chosen("name")]
        key = *together, str(one_machine)
        assert key not in failed, f"see the first test with {workers} workers"
        if key not in known:
            failed.add(key)
            cases = {other: CASES[other] for other in together}
            folder = tmp_path_factory.mktemp("pipedream")
            environment = {"CASES": json.dumps(cases), "PACELINE_RUN": str(folder)}
            known[key] = printed(SCRIPT, workers, folder, environment=environment, one_machine=one_machine), folder
            failed.remove(key)
        return known[key]

    return of


@pytest.mark.parametrize(
    ("name", "one_machine"),
    [
        *((name, True) for name in CASES),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in NETWORK),
    ],
)
def test_each_stage_uses_the_weights_of_the_forward_pass(results: Any, name: str, one_machine: bool) -> None:
    """With the newest weights in the backward pass the result would be another one."""
    everyone, _ = results(name, one_machine)
    assert all(one[name][key] == everyone[0][name][key] for one in everyone for key in ("fingerprint", "weights"))
    stashed, newest = everyone[0][name]["distances"]
    assert stashed < 1e-10 and newest > 1e-6


def stage_of(case: Case, rank: int) -> int:
    replicas = case.settings.get("replicas", [1] * case.workers)
    return next(stage for stage in range(len(replicas)) if rank < sum(replicas[: stage + 1]))


@pytest.mark.parametrize("name", CASES)
def test_no_more_versions_are_kept_than_the_paper_says(results: Any, name: str) -> None:
    """As many as there are stages from this one on; with vertical sync as many as stages; with 2BW two."""
    case = CASES[name]
    everyone, _ = results(name)
    for rank, one in enumerate(everyone):
        lag = case.lags[0 if case.settings.get("vertical_sync") else stage_of(case, rank)]
        most = 2 if case.settings["schedule"] == "2bw" else -(-lag // case.every) + 1
        assert one[name]["versions"] == most or (rank and one[name]["versions"] < most)


def test_the_staleness_is_told(results: Any) -> None:
    """In the long run each stage uses weights that are as many updates old as it is ahead."""
    _, folder = results(next(iter(CASES)))
    told = [
        json.loads(line) for path in sorted(folder.glob("events/*.jsonl")) for line in path.read_text().splitlines()
    ]
    found: dict[int, list[list[int]]] = {}
    for event in told:
        if event["event"] == "staleness":
            found.setdefault(event["stage"], []).append(event["staleness"])
    # the first case, an update after each of 20 microbatches: those that entered before the first update are younger
    for stage, lag in enumerate((2, 1, 0)):
        assert found[stage][:20] == [[min(number, lag)] for number in range(20)]


def test_a_session_closes_the_log_of_the_one_before(results: Any) -> None:
    everyone, _ = results(next(iter(CASES)))
    assert [case["logs"] for one in everyone for case in one.values()] == [1] * len(everyone) * len(everyone[0])


EMPTIED = """
import math, os
import pipedream_reference
import paceline
from paceline.data.order import Order
from subjects import tell

every, settings = pipedream_reference.data(40), {"schedule": "pipedream", "update_every": 2, "cut": ["4"]}

def arguments(model):
    return pipedream_reference.arguments(model, 60, 20, 5, **settings) | {
        "checkpoint": {"directory": os.environ["SAVED"], "every": 3, "background": False}
    }

def expected(*runs):
    layers = pipedream_reference.layers()
    one = pipedream_reference.ByHand(layers, [4], [1, 0], 2, lambda stage, m: max(0, m - 1 + stage) // 2)
    for run in runs:
        one.until_empty(pipedream_reference.microbatches(60, 20, 5, run))
    return one

model = pipedream_reference.layers()
session = paceline.start(**arguments(model))
evaluated = []
for batch in session.batches(steps=5):
    session.step(batch)
    if batch.step == 1:
        evaluated.append(session.evaluate(every))
middle = expected([0, 1])
whole = [value for stage in middle.stages for value in stage]
for part in whole:
    part.eval()
values, targets = every.tensors
for part in whole:
    values = part(values)
tell(
    evaluated=evaluated,
    expected=pipedream_reference.functional.cross_entropy(values, targets).item(),
    distance=expected([0, 1], [2], [3, 4]).farthest_from(model),
)

model = pipedream_reference.layers()
session = paceline.start(**arguments(model), resume="auto")
start = session.position
for batch in session.batches(steps=5):
    session.step(batch)
tell(start=start, resumed=expected([0, 1], [2], [3, 4]).farthest_from(model))

def spoiled(made, **more):
    data = pipedream_reference.data(60)
    data.tensors[0][Order(60, 20, 5, 0).microbatches_of(1)[2][0]] = math.nan
    given = arguments(made) | {"data": data, "nonfinite": "skip", "checkpoint": {}, "pipeline": settings | more}
    session = paceline.start(**given)
    reports = [session.step(batch) for batch in session.batches(steps=3)]
    return session, all(value.isfinite().all().item() for value in made.state_dict().values())

session, finite = spoiled(pipedream_reference.layers())
tell(skipped=[finite, session.fingerprint()])
session, finite = spoiled(pipedream_reference.tied(), cut=["3"], update_every=1)
tell(tied=[finite, session.fingerprint()])
"""


def test_the_pipeline_runs_empty_when_it_is_looked_at(printed: Printed, tmp_path: Path) -> None:
    """Before an evaluation and a checkpoint; a run that goes on from the checkpoint is the same as that not stopped."""
    saved = tmp_path / "saved"
    saved.mkdir()
    first, second = printed(EMPTIED, 2, tmp_path, environment={"SAVED": str(saved), "PACELINE_RUN": str(tmp_path)})
    for one in (first, second):
        assert one["evaluated"] == pytest.approx([one["expected"]], rel=1e-12)
        assert one["distance"] < 1e-10
        assert (one["start"], one["resumed"] < 1e-10) == (3, True)
        for name in ("skipped", "tied"):
            assert one[name] == [True, first[name][1]]
    events = [json.loads(line) for path in tmp_path.glob("events/*.jsonl") for line in path.read_text().splitlines()]
    skipped = [event for event in events if event["event"] == "skipped"]
    assert len(skipped) == 4 and all("nan" in event["reason"] for event in skipped)


SHORT_AT_A_MEETING = """
import torch
from functools import partial
from subjects import classes, mlp, tell, train

# the 20th batch, after which all workers meet, is a short one of a single microbatch
tell(**train({
    "model": mlp(), "optimizer": partial(torch.optim.SGD, lr=0.01), "loss": torch.nn.functional.cross_entropy,
    "data": classes(100), "batch": 32, "microbatches": 8, "strategy": "pipeline", "timeout_seconds": 60,
    "pipeline": {"schedule": "2bw", "stages": 2},
}, 22))
"""


def test_all_meet_after_a_batch_that_only_some_workers_have_a_part_of(printed: Printed, tmp_path: Path) -> None:
    everyone = printed(SHORT_AT_A_MEETING, 4, tmp_path)
    assert [one["steps"] for one in everyone] == [22] * 4
    assert len({one["fingerprint"] for one in everyone}) == 1
