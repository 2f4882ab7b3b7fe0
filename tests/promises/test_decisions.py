"""When a worker hangs, and when a run waits or ends: the decisions of the coordinator, with a clock of the test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.coordinator.hang_detection import WorkerStatus, deadline, describe, late_workers
from paceline.coordinator.membership import MembershipProtocol
from paceline.coordinator.types import Bounds

BUSY = WorkerStatus(1, 41, "in the data loader", waiting=False, since=31.0, line="train.py:41", step_seconds=0.1)
WAITS = WorkerStatus(0, 41, "in the all-reduce of bucket 2 of the gradients", waiting=True, since=30.0)


def training(bounds: Bounds, workers: int, fits: tuple[int, ...] = ()) -> MembershipProtocol:
    """Return the membership of workers that train since second 0."""
    made = MembershipProtocol(bounds, lambda numbers, message: None, lambda event, **fields: None)
    come(made, *range(workers), fits=fits)
    assert made.members == list(range(workers))
    return made


def come(membership: MembershipProtocol, *numbers: int, fits: tuple[int, ...] = ()) -> None:
    for number in numbers:
        membership.started(number)
    for number in numbers:
        membership.register(number, {"pid": number}, {}, fits=fits)
        membership.ready(number, None, 0.0)


def lose(membership: MembershipProtocol, number: int, now: float = 0.0) -> None:
    """Lose a worker; the others report that they are ready to go on."""
    membership.lose(number, f"worker {number} was killed", now)
    for other in list(membership.members):
        if other != number and membership.over is None:
            membership.ready(other, (5, 0), now)


@pytest.mark.promise(
    "docs/survive.md",
    "Without that setting it is 30 seconds, or ten times the usual step if that is more; until all have done a step, "
    "600 seconds, because they may be compiling.",
)
def test_how_long_is_too_long() -> None:
    def of(*seconds: float | None, given: float | None = None) -> float:
        return deadline([replace(BUSY, step_seconds=each) for each in seconds], given, first=600.0)

    assert (of(0.1, 0.1), of(9.0, 9.0), of(0.1, None), of(0.1, 0.1, given=7.0)) == (30.0, 90.0, 600.0, 7.0)


@pytest.mark.promise("docs/survive.md", "When others wait for a worker for too long", "Too long is `hang_seconds`.")
def test_who_is_late() -> None:
    assert late_workers([WAITS, BUSY], 29.0) == [BUSY]
    assert late_workers([WAITS, BUSY], 40.0) == []
    assert late_workers([replace(WAITS, waiting=False), BUSY], 29.0) == []


@pytest.mark.promise("docs/survive.md", "Who is saving a checkpoint is not late.")
def test_who_saves_is_not_late() -> None:
    assert late_workers([WAITS, replace(BUSY, busy=True)], 29.0) == []


@pytest.mark.promise(
    "docs/survive.md",
    "rank 0 has waited 30 s in the all-reduce of bucket 2 of the gradients at step 41; rank 1 has been in the data "
    "loader at step 41 for 31 s, train.py:41",
)
def test_what_is_said_of_all() -> None:
    assert describe([WAITS, BUSY]) == (
        "rank 0 has waited 30 s in the all-reduce of bucket 2 of the gradients at step 41; rank 1 has been in the data "
        "loader at step 41 for 31 s, train.py:41"
    )


@pytest.mark.promise(
    "docs/survive.md",
    "training waits for the new processes, `--patience` seconds (600).",
    "and the run ends with exit code 5.",
)
def test_a_run_below_the_least() -> None:
    waits = training(Bounds(3, 3, 3, replaces=True, patience=600.0), 3)
    waits.started(3)
    lose(waits, 1)
    waits.advance(599.0)
    assert waits.over is None and waits.changing
    waits.advance(601.0)
    assert waits.over is not None and waits.over["code"] == 5


@pytest.mark.promise(
    "docs/pipeline.md", "Then they wait for the process that replaces the lost one, as they do [below MIN]"
)
def test_stages_that_do_not_fit() -> None:
    fits = training(Bounds(2, 4, 4, replaces=True), 4, fits=(2, 4))
    fits.started(4)
    lose(fits, 1)
    assert fits.changing and fits.over is None and fits.generation == 0
    come(fits, 4, fits=(2, 4))
    assert fits.members == [0, 2, 3, 4]


@pytest.mark.promise(
    "docs/survive.md",
    "More than 10 losses (or 2 × MAX, if that is more) without a step in between end the run: that is no accident.",
)
def test_losses_that_are_no_accident() -> None:
    unlucky = training(Bounds(1, 3, 3, replaces=True), 3)
    for loss in range(12):  # the others report with the first one that they have done five steps
        assert unlucky.over is None, loss
        come(unlucky, 3 + loss)
        lose(unlucky, unlucky.members[-1])
    assert unlucky.over is not None and "11 workers were lost without a step" in unlucky.over["reason"]
