"""Shares that fit the speed: pure functions of measured seconds."""

import random

import pytest

from paceline.schedule.speed_shares import SpeedShares, contiguous, fit_counts


def test_fitted_counts_end_as_early_as_any() -> None:
    """Against all ways to cut 9 microbatches between 3 workers."""
    for seconds in [(1.0, 1.0, 1.0), (1.0, 2.0, 3.0), (0.4, 1.0, 0.7), (5.0, 1.0, 1.0)]:
        counts = fit_counts(9, seconds)
        end = max(count * pace for count, pace in zip(counts, seconds, strict=True))
        best = min(
            max(one * seconds[0], two * seconds[1], (9 - one - two) * seconds[2])
            for one in range(10)
            for two in range(10 - one)
        )
        assert sum(counts) == 9
        assert end == pytest.approx(best)


def test_shares_cover_everything_once() -> None:
    pace = SpeedShares(4, 64, fits=True)
    for _ in range(10):
        pace.observe([16.0, 16.0, 32.0, 8.0], [16] * 4)
    for total in (64, 63, 17, 3, 1):
        shares = pace.shares(total)
        assert [one for share in shares for one in share] == list(range(total))
    assert pace.counts[2] < pace.counts[0] < pace.counts[3]


def test_a_single_slow_step_changes_nothing() -> None:
    pace = SpeedShares(4, 64, fits=True)
    for step in range(20):
        slow = step % 4
        seconds = [64.0 if rank == slow else 16.0 for rank in range(4)]
        assert not pace.observe(seconds, [16] * 4)
    assert pace.counts == (16, 16, 16, 16)


def test_noise_changes_nothing() -> None:
    draw = random.Random(1)
    pace = SpeedShares(8, 128, fits=True)
    changes = sum(pace.observe([16 * draw.gauss(1, 0.02) for _ in range(8)], [16] * 8) for _ in range(200))
    assert changes <= 2


def test_a_change_that_stays_is_followed_within_a_few_steps() -> None:
    pace = SpeedShares(2, 30, fits=True)
    for _ in range(10):
        pace.observe([15.0, 15.0], [15, 15])
    steps = 0
    while pace.counts == (15, 15):
        pace.observe([15.0, 30.0], [15, 15])
        steps += 1
    assert 1 < steps <= 6
    assert pace.counts == (20, 10)


def test_a_worker_that_did_nothing_keeps_its_pace() -> None:
    pace = SpeedShares(2, 8, fits=True)
    for _ in range(6):
        pace.observe([4.0, 12.0], [4, 4])
    before = pace.seconds()
    pace.observe([8.0, 0.0], [8, 0])
    assert pace.seconds() == before


def test_even_shares_stay() -> None:
    pace = SpeedShares(2, 8, fits=False)
    assert not any(pace.observe([4.0, 40.0], [4, 4]) for _ in range(20))
    assert pace.shares(8) == contiguous([4, 4])
