"""Who is late, and how that is reported."""

from dataclasses import replace

import pytest

from paceline.coordinator.hang_detection import WorkerStatus, deadline, describe, late_workers

WAITS = WorkerStatus(0, 7, "in the all-reduce of bucket 2 of the gradients", waiting=True, since=40.0, step_seconds=0.1)
BUSY = WorkerStatus(1, 7, "in the script", waiting=False, since=41.0, line="train.py:41", step_seconds=0.1)


@pytest.mark.parametrize(
    ("seconds", "given", "limit"),
    [
        ([0.1, 0.1], None, 30.0),
        ([5.0, 4.0], None, 45.0),
        ([0.1, None], None, 600.0),
        ([], None, 600.0),
        ([5.0, 4.0], 3.0, 3.0),
        ([None, None], 2.0, 2.0),
    ],
)
@pytest.mark.promise(
    "docs/survive.md",
    "Without that setting it is 30 seconds, or ten times the usual step if that is more; until all have done a "
    "step, 600 seconds, because they may be compiling.",
)
def test_how_long_the_others_wait(seconds: list[float | None], given: float | None, limit: float) -> None:
    statuses = [replace(WAITS, rank=rank, step_seconds=each) for rank, each in enumerate(seconds)]
    assert deadline(statuses, given, first=600.0) == limit


@pytest.mark.promise("docs/survive.md", "When others wait for a worker for too long", "Too long is `hang_seconds`.")
def test_late_is_who_is_waited_for() -> None:
    assert late_workers([WAITS, BUSY], 30.0) == [BUSY]
    assert late_workers([WAITS, BUSY], 45.0) == []


def test_nobody_is_late_when_nobody_waits() -> None:
    assert late_workers([BUSY, replace(BUSY, rank=0)], 30.0) == []
    assert late_workers([replace(WAITS, since=10.0), BUSY], 30.0) == []


def test_what_was_last_heard_may_have_ended_since() -> None:
    assert late_workers([replace(WAITS, since=0.5, silent=1.0), replace(BUSY, since=0.5, silent=1.0)], 1.0) == []
    assert late_workers([replace(WAITS, since=1.5), replace(BUSY, since=0.5, silent=1.5)], 1.0) == []
    silent = replace(BUSY, since=0.5, silent=2.5)
    assert late_workers([replace(WAITS, since=1.5), silent], 1.0) == [silent]


@pytest.mark.promise("docs/survive.md", "Workers that are saving a checkpoint do not count as late.")
def test_who_saves_may_take_long() -> None:
    assert late_workers([WAITS, replace(BUSY, busy=True)], 30.0) == []


def test_who_is_silent_is_late_whatever_it_did_last() -> None:
    silent = replace(WAITS, rank=1, since=1.0, silent=35.0)
    assert late_workers([WAITS, silent], 30.0) == [silent]
    silent = replace(BUSY, busy=True, silent=35.0)
    assert late_workers([WAITS, silent], 30.0) == [silent]


def test_all_wait_for_each_other() -> None:
    assert late_workers([WAITS, replace(WAITS, rank=1)], 30.0) == []


@pytest.mark.promise(
    "docs/survive.md",
    "rank 0 has waited 30 s in the all-reduce of bucket 2 of the gradients at step 41; rank 1 has been in the "
    "data loader at step 41 for 31 s, train.py:41",
)
def test_what_all_do_in_one_sentence() -> None:
    silent = WorkerStatus(3, 6, "computing", waiting=False, since=1.0, silent=39.0, line="train.py:40")
    assert describe([BUSY, WAITS, silent, replace(WAITS, rank=2, since=39.0)]) == (
        "ranks 0, 2 have waited 40 s in the all-reduce of bucket 2 of the gradients at step 7; "
        "rank 1 has been in the script at step 7 for 41 s, train.py:41; "
        "rank 3 has not responded for 39 s (stopped, or its machine cannot be reached), last seen computing at step 6, "
        "train.py:40"
    )


def test_who_is_silent_since_a_wait_is_not_said_to_wait() -> None:
    """It may have been stopped right after the wait, before its next heartbeat."""
    stopped = WorkerStatus(1, 6, "in a gather of all workers (audit)", waiting=True, since=0.1, silent=21.0)
    assert describe([WAITS, stopped]).endswith(
        "; rank 1 has not responded for 21 s (stopped, or its machine cannot be reached), last seen in a gather of all "
        "workers (audit) at step 6"
    )
