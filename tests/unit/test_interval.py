"""How often to save: Young's and Daly's formula, over measured times."""

import math

import pytest

from paceline.checkpoint.interval import FIRST, Interval, best_interval

HOUR = 3600.0


def test_near_young_for_a_small_cost() -> None:
    assert best_interval(0.05, 24 * HOUR) == pytest.approx(math.sqrt(2 * 0.05 * 24 * HOUR), rel=1e-2)


def test_as_daly_computed_it() -> None:
    """The least of Daly's exact cost of a run (2006, equation 20, without restart), searched for."""
    for cost, mtbf in ((5 * 60, 24 * HOUR), (5 * 60, 3 * HOUR), (600, 1 * HOUR)):

        def time_of_a_run(interval: float, cost: float = cost, mtbf: float = mtbf) -> float:
            return mtbf * math.expm1((interval + cost) / mtbf) / interval

        best = min(range(60, 20_000, 5), key=time_of_a_run)
        assert best_interval(cost, mtbf) == pytest.approx(best, rel=0.01)


def test_never_longer_than_the_time_between_failures() -> None:
    assert best_interval(50.0, 20.0) == 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def train(interval: Interval, clock: Clock, steps: range, seconds: float) -> list[int]:
    """The steps after which a checkpoint is due; none is taken."""
    due = []
    for step in steps:
        clock.now += seconds
        interval.step()
        if interval.due(step):
            due.append(step)
    return due


def test_follows_what_is_measured() -> None:
    clock = Clock()
    interval = Interval(24 * HOUR, clock)
    interval.reset(0)
    assert interval.decision() is None
    assert train(interval, clock, range(1, FIRST + 1), 0.5) == [FIRST]
    clock.now += 0.05
    interval.reset(FIRST)
    interval.add_save(stall=0.05, total=2.0)
    expected = math.ceil(best_interval(0.05, 24 * HOUR) / 0.5)
    assert interval.steps == expected
    decision = interval.decision()
    assert decision is not None and decision["text"] == (
        f"checkpoint every {expected} steps (93 s): a save stalls training for 0.05 s, "
        f"one failure in 24 h expected (Young/Daly)"
    )
    assert interval.decision() is None, "announced once"
    due = train(interval, clock, range(FIRST + 1, FIRST + expected + 3), 0.5)
    assert due[0] == FIRST + expected
    train(interval, clock, range(200, 300), 0.1)  # the steps have become faster
    assert interval.steps > 4 * expected
    assert interval.decision() is not None


def test_no_save_begins_before_the_one_before_has_ended() -> None:
    clock = Clock()
    interval = Interval(60.0, clock)
    interval.reset(40)
    train(interval, clock, range(41, 44), 1.0)
    interval.add_save(stall=0.01, total=30.0)
    assert interval.steps == 30
    decision = interval.decision()
    assert decision is not None and str(decision["text"]).endswith("and takes 30 s, the lower bound")
    assert not interval.due(69) and interval.due(70)
