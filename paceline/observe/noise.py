"""Gradient noise scale: the batch size up to which more samples in a step save nearly as many steps.

::

    |g|²   ├─────── |G|² ───────┼── S / batch ──┼──── S / microbatch ... ──┤      S / |G|²: the noise scale, in samples
           gradient without noise    in the batch      in a microbatch

The squared norm of a mean gradient over b samples is on average |G|² + S / b, where S is the variance of the gradient
of a sample. The norms of an audited microbatch and of its whole batch give S and |G|² without bias (McCandlish et al.
2018, arXiv 1812.06162, appendix A). Both are noisy, so their means over the sampled steps are divided, and the interval
is that of Fieller 1954 for a ratio of two means: it has no upper end if |G|² may be zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.observe.records import Record, number

EVENT = "microbatch-norm"
"""Event with the norm of the mean gradient of a microbatch; the norm of its batch is in the event ``step``."""
_LEAST_STEPS = 8  # fewest sampled steps from which a noise scale follows
_QUANTILE = 2.0  # half the width of the interval in standard errors: about 95 %


@dataclass(frozen=True)
class NoiseScale:
    """Gradient noise scale of the second half of a run, in samples, with an interval of about 95 %."""

    batch: int  # samples in a step
    samples: float | None  # noise scale. None if the mean gradient is indistinguishable from zero
    low: float
    high: float | None  # None if the interval has no upper end
    steps: int  # number of sampled steps


class NoiseRecords:
    """Norms of the gradients of microbatches and batches, by step."""

    def __init__(self) -> None:
        self._batches: dict[int, float] = {}
        self._microbatches: dict[int, tuple[float, float, float]] = {}

    def add(self, record: Record) -> None:
        """Add a record. If a step was taken again after a return to a checkpoint, its last record counts."""
        step = record.get("step")
        if type(step) is not int:
            return
        if record["event"] == "step" and "optimizer" not in record:  # a batch may have several losses
            self._batches[step] = _number(record, "gradient_norm")
        elif record["event"] == EVENT:
            self._microbatches[step] = (_number(record, "samples"), _number(record, "batch"), _number(record, "norm"))

    def scale(self) -> NoiseScale | None:
        """Return the noise scale of the second half of the run. None if it has too few sampled steps."""
        middle = max(self._batches, default=0) / 2
        pairs, batch = list[tuple[float, float]](), 0.0
        for step, (samples, whole, small) in sorted(self._microbatches.items()):
            large = self._batches.get(step, math.nan)
            if step >= middle and 0 < samples < whole and math.isfinite(large + small):
                pairs.append(variance_and_square(samples, whole, small, large))
                batch = whole
        if len(pairs) < _LEAST_STEPS:
            return None
        samples_, low, high = ratio_of_means(pairs)
        return NoiseScale(int(batch), samples_, low, high, len(pairs))


def _number(record: Record, name: str) -> float:
    found = number(record.get(name))
    return math.nan if found is None else found


def variance_and_square(samples: float, batch: float, small: float, large: float) -> tuple[float, float]:
    """Return the variance of the gradient of a sample, and the squared norm of the gradient without noise.

    Args:
        samples: number of samples of the microbatch.
        batch: number of samples of the batch, of which the microbatch is a part.
        small: norm of the mean gradient of the microbatch.
        large: norm of the mean gradient of the batch.

    >>> variance_and_square(1, 4, 3.0, 2.0)  # 9 = G + S and 4 = G + S / 4
    (6.666666666666667, 2.3333333333333335)
    """
    variance = (small**2 - large**2) / (1 / samples - 1 / batch)
    return variance, (batch * large**2 - samples * small**2) / (batch - samples)


def ratio_of_means(pairs: Sequence[tuple[float, float]]) -> tuple[float | None, float, float | None]:
    """Return the ratio of the means of two values that are at least 0, and its interval; None where it has no end.

    >>> ratio_of_means([(6.0, 2.0), (6.0, 2.0)])
    (3.0, 3.0, 3.0)
    >>> ratio_of_means([(6.0, 2.0), (6.0, -2.0)])
    (None, 1.5, None)
    """
    tops, bottoms = zip(*pairs, strict=True)
    top, bottom = fmean(tops), fmean(bottoms)
    squares = _QUANTILE**2 / (len(pairs) * (len(pairs) - 1))
    of_tops = squares * math.fsum((one - top) ** 2 for one in tops)
    of_bottoms = squares * math.fsum((one - bottom) ** 2 for one in bottoms)
    both = squares * math.fsum((one - top) * (other - bottom) for one, other in pairs)
    # the interval has the ratios r with (top - r * bottom)² <= the variance of top - r * bottom, times the quantile²
    a, b, c = bottom**2 - of_bottoms, top * bottom - both, top**2 - of_tops
    root = math.sqrt(max(0.0, b * b - a * c))
    low = max(0.0, c / (b + root)) if b + root else 0.0
    return (top / bottom if bottom > 0 else None), low, ((b + root) / a if a > 0 < bottom else None)


def sentence(found: NoiseScale) -> str:
    """Return the noise scale as text, beside the batch of the run."""
    about = "is not known" if found.samples is None else f"is about {_rounded(found.samples)} samples"
    ends = (
        f"at least {_rounded(found.low)}" if found.high is None else f"{_rounded(found.low)} to {_rounded(found.high)}"
    )
    if found.batch < found.low:
        advice = f"a batch above {found.batch} would need fewer steps for nearly as many samples"
    elif found.high is None:
        advice = "sample more steps, as with audit=20"
    elif found.batch > found.high:
        advice = f"a batch below {found.batch} would need fewer samples for nearly as many steps"
    else:
        advice = f"the batch of {found.batch} may be right"
    return f"the gradient noise scale {about} ({ends}, from {found.steps} sampled steps): {advice}"


def _rounded(value: float) -> str:
    return f"{float(f'{value:.2g}'):.0f}" if value >= 10 else f"{value:.2g}"
