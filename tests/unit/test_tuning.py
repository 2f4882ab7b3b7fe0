"""Advice of ``paceline tune`` from the losses of branches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.observe.tuning import Branch, branch_of, critical_batch, learning_rate
from paceline.observe.tuning.page import draw_batches, draw_rates, html


def ramp(seed: int, loss: Callable[[float], float], steps: int = 100, diverged: bool = True) -> Branch:
    """A branch of a range test from 1e-4 to 1, with some noise."""
    noise = random.Random(seed)
    rates = [10 ** (-4 + 4 * step / (steps - 1)) for step in range(steps)]
    losses = [loss(rate) + noise.gauss(0, 0.01) for rate in rates]
    return Branch(seed, 64, rates, losses, [64] * steps, diverged)


def valley(rate: float) -> float:
    """Lowest at 0.1."""
    return 1 + 0.2 * math.log10(rate / 0.1) ** 2


def test_the_rate_is_a_tenth_of_that_with_the_lowest_loss() -> None:
    advice = learning_rate([ramp(seed, valley) for seed in range(3)])
    assert advice.value is not None and advice.low is not None and advice.high is not None
    assert advice.low < 0.01 < advice.high and 0.005 < advice.value < 0.02
    spread = learning_rate([ramp(seed, lambda rate, at=seed: valley(rate * 2**at)) for seed in range(3)])
    assert spread.low is not None and spread.high is not None
    assert spread.high / spread.low > 2 * advice.high / advice.low, "branches that differ more"
    alone = learning_rate([ramp(0, valley)])
    assert alone.value is not None and alone.low is alone.high is None


@pytest.mark.parametrize(
    ("branch", "reason"),
    [
        (replace(ramp(0, valley), losses=[], rates=[], samples=[]), "first loss with seed 0 is not finite"),
        (ramp(0, valley, steps=5), "diverges at once, from the rate 0.0001 on"),
        (ramp(0, lambda _: 1.0), "falls at no rate from 0.0001 to 1"),
        (ramp(0, lambda rate: rate), "falls at no rate"),
        (ramp(0, lambda rate: 1 - rate, diverged=False), "still falls at the highest rate, 1: end higher"),
    ],
)
def test_without_an_answer_the_reason_is_told(branch: Branch, reason: str) -> None:
    advice = learning_rate([branch])
    assert advice.value is None and reason in advice.reason


def of_batches(loss: Callable[[int, int], float], seeds: int = 3, diverged: tuple[int, ...] = ()) -> list[Branch]:
    found = []
    for batch in (32, 64, 128, 256, 512):
        for seed in range(seeds):
            end, count = loss(batch, seed), 2048 // batch
            losses = [2.0] * (count - count // 4) + [end] * (count // 4)
            found.append(Branch(seed, batch, [0.1] * count, losses, [batch] * count, batch in diverged))
    return found


def test_the_critical_batch_is_the_largest_whose_loss_is_nearly_as_low() -> None:
    found = of_batches(lambda batch, seed: 1 + 0.1 * seed + 1e-5 * batch + (0.1 if batch > 128 else 0))
    advice = critical_batch(found)
    assert (advice.value, advice.low, advice.high) == (128, 128, 256), "seeds are compared in pairs"
    unsure = critical_batch(of_batches(lambda batch, seed: 1 + (0.1 if batch > 128 else 0) * (seed - 0.5)))
    assert (unsure.value, unsure.low, unsure.high) == (128, 128, None)
    assert critical_batch(of_batches(lambda batch, seed: 1.0)).value == 512
    high = critical_batch(of_batches(lambda batch, seed: 1.0, diverged=(128, 512)))
    assert (high.value, high.high) == (64, 128)
    assert critical_batch(of_batches(lambda batch, seed: 1.0, seeds=1)).low is None
    assert "diverges with the smallest batch, 32" in critical_batch(of_batches(lambda *_: 1.0, diverged=(32,))).reason
    assert "does not fall" in critical_batch(of_batches(lambda *_: 2.0)).reason


def test_a_branch_is_read_from_its_records() -> None:
    about = {"event": "branch", "rate": 0.1, "batch": 8, "step": 0}
    steps = [{"event": "step", "step": at, "loss": 3.0 - at, "learning_rate": 0.1, "samples": 8} for at in range(3)]
    ended = {"event": "branch-end", "step": 2, "diverged": True}
    assert branch_of([], 0) is None
    assert branch_of([about, *steps, ended], 7) == Branch(7, 8, [0.1] * 2, [3.0, 2.0], [8] * 2, True)
    assert branch_of([about, {**steps[0], "loss": math.nan}], 7) == Branch(7, 8, [], [], [], False)


def test_the_page_shows_both_tests_and_no_script_runs_in_it() -> None:
    rates, batches = [ramp(0, valley)], of_batches(lambda *_: 1.0, diverged=(512,))
    page = html(
        "tune <script>alert(1)</script>.py",
        [
            ("Learning rate", lambda parent: draw_rates(parent, rates, learning_rate(rates)), ["a & b"]),
            ("Batch", lambda parent: draw_batches(parent, batches, critical_batch(batches)), []),
            ("None", None, []),
        ],
    )
    assert page.count("<svg") == 2 and page.count("<circle") == 12 and "<script" not in page and "a &amp; b" in page
    assert "nan" not in page and "inf" not in page.replace("interval", "")
