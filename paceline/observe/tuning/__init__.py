"""Advice on learning rate and batch from short branches of a script (``paceline tune``).

Learning-rate range test (Smith 2015, arXiv 1506.01186). The rate grows by the same ratio in each step::

    loss  ──────╮                      /  diverges
                 ╰──╮                 /
                     ╰───────╮    ___/
                             ╰───╯
    rate  low ... recommended ... lowest loss ... high      recommended: a tenth of the rate with the lowest loss

Critical batch by branches (after Merrill et al. 2025, arXiv 2505.23971): branches with 1, 2, 4, ... times the batch
train on equally many samples, with a learning rate that follows the batch. The critical batch is the largest one whose
loss at the end is within a tolerance of that of the smallest.

Branches differ in their seeds, and so in the order of samples. The intervals are those of Student for the mean of the
branches, about 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from paceline.observe.records import Record, number

TOLERANCE = 0.01  # largest relative excess of the critical batch's loss over that of the smallest batch
_BELOW_LOWEST = 10.0
_WINDOW = 1 / 25  # half the width of the window over which losses are smoothed, as a part of the branch
_LEAST_POINTS = 8
_LAST_PART = 1 / 4  # last part of a branch's samples, whose mean loss counts as the loss at its end
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Quantiles for 2, 3, ... branches.


@dataclass(frozen=True)
class Branch:
    """Steps of a branch that were taken, and how it ended."""

    seed: int
    batch: int
    rates: Sequence[float]
    losses: Sequence[float]
    samples: Sequence[int]
    diverged: bool

    @property
    def smoothed(self) -> list[float]:
        """Losses as means over the steps around each, weighted by a triangle, so that they do not lag behind."""
        half = max(1, round(_WINDOW * len(self.losses)))
        found = []
        for place in range(len(self.losses)):
            near = range(max(0, place - half), min(len(self.losses), place + half + 1))
            weights = [half + 1 - abs(place - other) for other in near]
            found.append(sum(x * self.losses[at] for x, at in zip(weights, near, strict=True)) / sum(weights))
        return found

    @property
    def at_end(self) -> float:
        """Mean loss over the last samples. Infinite if the branch diverged."""
        left, total, count = _LAST_PART * sum(self.samples), 0.0, 0
        for loss, samples in zip(reversed(self.losses), reversed(self.samples), strict=True):
            if count < left:
                total, count = total + samples * loss, count + samples
        return math.inf if self.diverged or not count else total / count


def branch_of(records: Sequence[Record], seed: int) -> Branch | None:
    """Return a branch from the records of rank 0. None if it did not start."""
    if (about := next((record for record in records if record["event"] == "branch"), None)) is None:
        return None
    steps = [record for record in records if record["event"] == "step" and number(record.get("loss")) is not None]
    ended = [record for record in records if record["event"] == "branch-end"]
    if ended and ended[-1]["diverged"]:
        steps = [record for record in steps if record["step"] < ended[-1]["step"]]
    rates, losses, samples = ([one[name] for one in steps] for name in ("learning_rate", "loss", "samples"))
    return Branch(seed, about["batch"], rates, losses, samples, bool(ended) and ended[-1]["diverged"])


@dataclass(frozen=True)
class Advice:
    """Recommended learning rate or batch, with its interval, and the reason in words."""

    value: float | None  # None if the branches do not show it
    low: float | None
    high: float | None  # None if the interval has no upper end
    reason: str


def learning_rate(branches: Sequence[Branch]) -> Advice:
    """Return the recommended learning rate from branches of a range test."""
    found = list[float]()
    for branch in branches:
        if (reason := _unusable(branch)) is not None:
            return Advice(None, None, None, reason)
        smoothed = branch.smoothed
        found.append(branch.rates[smoothed.index(min(smoothed))] / _BELOW_LOWEST)
    logarithms = [math.log(one) for one in found]
    middle = fmean(logarithms)
    first = branches[0]
    window = _WINDOW * abs(math.log(first.rates[-1] / first.rates[0]))
    half = _half_interval(logarithms)
    reason = "a tenth of the rate at which the loss is lowest"
    if half is None:
        return Advice(math.exp(middle), None, None, reason)
    half = max(half, window)
    return Advice(math.exp(middle), math.exp(middle - half), math.exp(middle + half), reason)


def _unusable(branch: Branch) -> str | None:
    """Return the reason if a branch yields no learning rate."""
    where = f"with seed {branch.seed}"
    if not branch.losses:
        return (
            f"the first loss {where} is not finite, whatever the learning rate: find the cause with paceline run and "
            f"paceline replay --anomaly"
        )
    if len(branch.losses) < _LEAST_POINTS:
        return f"the loss {where} diverges at once, from the rate {branch.rates[0]:.3g} on: begin lower, as with --span"
    smoothed = branch.smoothed
    lowest = smoothed.index(min(smoothed))
    noise = stdev(one - two for one, two in zip(branch.losses, smoothed, strict=True))
    if smoothed[0] - smoothed[lowest] <= 2 * noise / math.sqrt(max(1, round(_WINDOW * len(branch.losses)))):
        return (
            f"the loss {where} falls at no rate from {branch.rates[0]:.3g} to {branch.rates[-1]:.3g}: take more "
            f"--steps or another --span, and check that the model can learn from its data"
        )
    if lowest >= len(smoothed) - 1 - max(1, round(_WINDOW * len(smoothed))) and not branch.diverged:
        return f"the loss {where} still falls at the highest rate, {branch.rates[-1]:.3g}: end higher, as with --span"
    return None


def critical_batch(branches: Sequence[Branch]) -> Advice:
    """Return the critical batch from branches with several batches and seeds.

    Branches of a seed train on the same samples in the same order, so they are compared in pairs.
    """
    ends: dict[int, dict[int, float]] = {}
    for branch in branches:
        ends.setdefault(branch.batch, {})[branch.seed] = branch.at_end
    smallest, *larger = sorted(ends)
    usual = ends[smallest]
    base = [branch for branch in branches if branch.batch == smallest]
    if any(branch.diverged for branch in base):
        return Advice(
            None, None, None, f"the loss diverges with the smallest batch, {smallest}: lower the learning rate"
        )
    if all(branch.at_end >= fmean(branch.losses[: len(branch.losses) // 4 or 1]) for branch in base):
        return Advice(
            None, None, None, f"the loss does not fall with the smallest batch, {smallest}: take more --samples"
        )
    most = TOLERANCE * abs(fmean(usual.values()))
    value, low, high, within, surely = smallest, smallest, None, True, True
    for batch in larger:
        excess = [ends[batch][seed] - loss for seed, loss in usual.items()]
        half = _half_interval(excess) if all(map(math.isfinite, excess)) else 0.0
        within &= fmean(excess) <= most
        surely &= half is not None and fmean(excess) + half <= most
        value, low = batch if within else value, batch if surely else low
        if high is None and half is not None and fmean(excess) - half > most:
            high = batch
    reason = f"the largest batch whose loss after equally many samples is at most {TOLERANCE:.0%} higher"
    return Advice(value, low if len(usual) > 1 else None, high, reason)


def _half_interval(values: Sequence[float]) -> float | None:
    """Return half the width of the interval of the mean. None for a single value."""
    if len(values) < 2:
        return None
    return _STUDENT[min(len(values) - 2, len(_STUDENT) - 1)] * stdev(values) / math.sqrt(len(values))


def factor_of(optimizer: str, ratio: float) -> float:
    """Return the factor of the learning rate for a batch that is larger by a ratio.

    In proportion with SGD, else with the square root (Malladi et al. 2022, arXiv 2205.10287).
    """
    return ratio if optimizer.partition(",")[0] == "SGD" else math.sqrt(ratio)
