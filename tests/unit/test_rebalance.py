"""Stages that do not take as long as was measured, and a cut that fits them."""

from itertools import combinations

import pytest

from paceline.schedule.balance import fit_bounds
from paceline.strategies.pipeline.rebalance import WINDOW, Rebalance


@pytest.mark.parametrize("factors", [[1.0, 1.0], [1.0, 3.0], [2.0, 1.0, 1.0], [1.0, 1.0, 4.0, 1.0]])
def test_the_cut_is_the_best_there_is(factors: list[float]) -> None:
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]

    def slowest(bounds: tuple[tuple[int, int], ...]) -> float:
        return max(factor * sum(costs[begin:end]) for factor, (begin, end) in zip(factors, bounds, strict=True))

    every = [
        tuple(zip((0, *places), (*places, len(costs)), strict=True))
        for places in combinations(range(1, len(costs)), len(factors) - 1)
    ]
    assert slowest(fit_bounds(costs, factors)) == min(map(slowest, every))


def test_a_slow_worker_gets_fewer_layers() -> None:
    rebalance = Rebalance([1.0] * 6, [(0, 3), (3, 6)], [(0,), (1,)])
    decisions = [rebalance.add_step([3.0, 6.0]) for _ in range(WINDOW)]
    assert decisions[:-1] == [None] * (WINDOW - 1)
    assert decisions[-1] is not None
    assert decisions[-1].stage == 1
    assert decisions[-1].bounds == ((0, 4), (4, 6))
    assert decisions[-1].gain == 1.5
    assert "stage 1 takes 1.33 times as long as the mean stage" in decisions[-1].describe()


def test_one_slow_step_changes_nothing() -> None:
    rebalance = Rebalance([1.0] * 6, [(0, 3), (3, 6)], [(0,), (1,)])
    assert [rebalance.add_step([3.0, 60.0 if step == 4 else 3.1]) for step in range(WINDOW)] == [None] * WINDOW


def test_the_slowest_worker_of_a_stage_counts() -> None:
    rebalance = Rebalance([1.0] * 6, [(0, 3), (3, 6)], [(0, 1), (2, 3)])
    decisions = [rebalance.add_step([1.5, 3.0, 1.5, 1.5]) for _ in range(WINDOW)]
    assert decisions[-1] is not None and decisions[-1].bounds == ((0, 2), (2, 6))
