"""Parameter servers of workers that share no memory: the rules, the bits and the refusals of those that do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_counts import RATE, updates_in
from test_parameter_server import (  # noqa: F401 - averaged and counted are fixtures
    ONE_COMPUTES,
    RESUMED,
    SKIPPED,
    STEPS,
    SYNC,
    SYNC_CASES,
    averaged,
    counted,
    expected,
    staleness,
)

Printed = Callable[..., list[dict[str, Any]]]
Run = Callable[..., Any]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dedicated", [False, True])
def test_each_step_is_applied_once(counted: Any, dedicated: bool) -> None:  # noqa: F811
    updates = counted({"mode": "async", "dedicated": dedicated}, one_machine=False)
    assert {one["rank"] for one in updates} == ({1, 2} if dedicated else {0, 1, 2})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("bound", "dedicated"), [(0, False), (1, True), (3, False)])
def test_staleness_is_never_above_the_bound(counted: Any, bound: int, dedicated: bool) -> None:  # noqa: F811
    server = {"mode": "bounded", "staleness": bound, "dedicated": dedicated}
    slow = "0,0.06,0,0.001" if dedicated else "0.06,0,0.001"
    updates = counted(server, 4 if dedicated else 3, slow, one_machine=False)
    found = staleness(updates, 3)
    assert max(found) <= bound
    assert found == [one["staleness"] for one in updates]


def test_a_dropped_gradient_is_never_applied(counted: Any, tmp_path: Path) -> None:  # noqa: F811
    updates = counted({"mode": "async", "drop_after": 1}, 3, "0.02,0,0.001", one_machine=False, late=True)
    assert max(one["delay"] for one in updates) <= 1
    dropped = updates_in(tmp_path, "dropped")
    assert dropped and min(one["delay"] for one in dropped) > 1


@pytest.mark.slow
def test_a_late_gradient_has_a_smaller_rate(counted: Any) -> None:  # noqa: F811
    updates = counted({"mode": "async", "scale_lr": True}, 4, one_machine=False, late=True)
    assert all(one["learning_rate"] == RATE / (1 + one["delay"]) for one in updates)
    assert max(one["delay"] for one in updates) > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["async", "bounded"])
@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("batch norm, dropout, short batch", 1),
        ("transformer, tied weights, clipping, schedule", 2),
        ("layer used sometimes", 2),
    ],
)
def test_one_worker_that_computes_is_the_single_process(
    printed: Printed, tmp_path: Path, case: str, count: int, mode: str
) -> None:
    """Also with several servers, each of which clips by the norm of all and has a schedule of its own."""
    script = ONE_COMPUTES.replace('"dedicated": True', '"dedicated": True, "count": int(os.environ["COUNT"])')
    environment = {"CASE": case, "MODE": mode}
    (alone,) = printed(script, 1, tmp_path / "alone", environment=environment | {"COUNT": "1"})
    several = environment | {"COUNT": str(count)}
    for one in printed(script, count + 1, tmp_path / "several", environment=several, one_machine=False):
        assert one == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "server"), [(2, {}), (4, {"count": 4}), (4, {"count": 2, "dedicated": True})], ids=str
)
def test_in_mode_sync_the_bits_are_those_of_all_reduce(
    printed: Printed,
    tmp_path: Path,
    averaged: dict[str, Any],  # noqa: F811
    workers: int,
    server: dict[str, Any],
) -> None:
    environment = {"STRATEGY": "parameter-server", "SERVER": json.dumps(server), "CASES": json.dumps(SYNC_CASES)}
    for one in printed(SYNC, workers, tmp_path, environment=environment, deadline=100, one_machine=False):
        assert one == averaged


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_it_goes_on_from_a_checkpoint(printed: Printed, tmp_path: Path, mode: str) -> None:
    """Of workers over the network, of workers on one machine, and alone."""
    environment = {"SAVED": str(tmp_path / "saved"), "SERVER": json.dumps({"mode": mode}), "SLOW": "0.004,0"}
    printed(RESUMED, 3, tmp_path / "first", environment=environment | {"STOP": "8"}, one_machine=False)
    again = printed(RESUMED, 2, tmp_path / "second", environment=environment | {"STOP": "16"})
    assert again == [{"start": 6, "weights": expected(2)}] * 2
    (alone,) = printed(RESUMED, 1, tmp_path / "third", environment=environment | {"STOP": "16"})
    assert alone == {"start": 15, "weights": expected(2)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_step_that_is_not_finite_is_left_out(printed: Printed, tmp_path: Path, mode: str) -> None:
    environment = {"PACELINE_RUN": str(tmp_path), "SERVER": json.dumps({"mode": mode}), "THEN": "skip", "EPOCHS": "2"}
    everyone = printed(SKIPPED, 3, tmp_path, environment=environment, one_machine=False)
    assert everyone == [{"finite": True, "position": 2 * STEPS}] * 3


def test_a_loss_that_is_not_finite_ends_the_run(ranks: Run, tmp_path: Path) -> None:
    environment = {"SERVER": '{"mode": "async"}', "THEN": "stop", "EPOCHS": "1"}
    everyone = ranks(SKIPPED, 3, tmp_path, environment=environment, one_machine=False, after_failure=60)
    assert sorted(one.code for one in everyone) == [1, 5, 5], [one.err for one in everyone]
