"""Comparison of two runs' traces, step by step, to find whether they trained the same. No torch.

Two runs that add the same numbers in different orders differ by rounding. The limits are:

* In step 0 the weights are equal, so loss and gradient differ only by the rounding of sums. That is a few epsilon,
  multiplied by tens and seldom by hundreds where sums cancel. The limit is 1,000 epsilon.
* From step 1 on the weights differ by rounding, and a few activations near zero change sides of a ReLU. If a share s of
  the activations flips, the gradient moves by about sqrt(s), so the unit is the square root of epsilon. Training
  amplifies differences, so the limit doubles every five steps.
* Adam turns a gradient that is only rounding (a bias before a normalization) into a full step, so a difference in
  weights is compared with the distance that the weights have moved.

Tests on small MLPs, CNNs and transformers with SGD and Adam, float32 and bfloat16, 30 steps and four orders gave no
false alarm. They detected a gradient off by 0.1 % in step 0 or 5 % in step 7, statistics of half a batch, and noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.diagnostics.verify import causes
from paceline.diagnostics.verify.causes import Difference, Kind
from paceline.diagnostics.verify.run_trace import RunTrace, StepTrace, TensorSketch

Result = Literal["identical", "rounding", "different"]

_FIRST_STEP = 1e3  # times epsilon
_FIRST_STEP_CEILING = 0.02  # bfloat16: a thousand epsilon would allow anything
_LATER_LOSS, _LATER_TENSORS = 3.0, 30.0  # times the square root of epsilon, doubling every _DOUBLING steps
_DOUBLING = 5
_LATER_CEILING = 0.25
_STATE = 0.1  # share of the distance that weights have moved, or of the norm of an optimizer's tensors
_SMALL = 0.1  # in step 0 a small tensor is compared with this share of the largest norm


@dataclass(frozen=True)
class Comparison:
    """Result of :func:`compare`."""

    result: Result  # whether the runs are identical, differ by rounding, or are different
    first: Difference | None = None  # first difference, or None
    beyond: Difference | None = None  # first difference that rounding does not explain, or None
    cause: str = ""  # likely cause in words


def compare(reference: RunTrace, other: RunTrace) -> Comparison:
    """Compare two runs that should have trained the same."""
    if not (differences := list(_differences(reference, other))):
        return Comparison("identical")
    first = differences[0]
    if (beyond := next((one for one in differences if one.beyond), None)) is not None:
        return Comparison("different", first, beyond, causes.of_difference(reference, other, first, beyond))
    return Comparison("rounding", first, None, causes.of_rounding(reference, other))


def _differences(reference: RunTrace, other: RunTrace) -> Iterator[Difference]:
    """Yield all differences, in the order in which a step computes the values."""
    epsilon, start, moved = reference.epsilon, reference.records[0].state, 0.0
    for one, two in zip(reference.records, other.records, strict=False):
        for kind, value, twin in _numbers(one, two):
            if value != twin and not _both_nan(value, twin):
                limit = _limit(epsilon, one.step, _LATER_LOSS) * _loss_scale(value, reference)
                yield Difference(one.step, kind, "", value, twin, kind != "loss" or _gap(value, twin) > limit)
        if one.gradient is not None and two.gradient is not None:
            yield from _tensors("gradient", one.step, one.gradient, two.gradient, epsilon)
        moved = max(moved, _distance(start, one.state, "parameter/"))
        for kind in ("parameter", "buffer", "optimizer"):
            for slot in sorted(_slots(one.state, kind) | _slots(two.state, kind)):
                mine, theirs = _part(one.state, kind, slot), _part(two.state, kind, slot)
                yield from _tensors(kind, one.step, mine, theirs, epsilon, moved)
    short, long = sorted((len(reference.records), len(other.records)))
    if short != long:
        yield Difference(short - 1, "end", "", len(reference.records) - 1, len(other.records) - 1, True)


def _numbers(one: StepTrace, two: StepTrace) -> tuple[tuple[Kind, float | None, float | None], ...]:
    return (
        ("samples", one.samples, two.samples),
        ("learning rate", one.learning_rate, two.learning_rate),
        ("loss", one.loss, two.loss),
    )


def _limit(epsilon: float, step: int, later: float) -> float:
    """Return the relative difference that rounding may cause by a step. See the top of this file."""
    if step <= 0:
        return min(_FIRST_STEP_CEILING, _FIRST_STEP * epsilon)
    return min(_LATER_CEILING, later * math.sqrt(epsilon) * math.pow(2.0, step / _DOUBLING))


def _tensors(
    kind: Kind,
    step: int,
    mine: Mapping[str, TensorSketch],
    theirs: Mapping[str, TensorSketch],
    epsilon: float,
    moved: float = 0.0,
) -> Iterator[Difference]:
    """Yield the tensors of a kind whose bits differ, with differences beyond rounding first."""
    if missing := sorted(mine.keys() ^ theirs.keys()):
        yield Difference(step, kind, missing[0], missing[0] in mine, missing[0] in theirs, True)
    gaps = {
        name: _gap(mine[name].projection, theirs[name].projection)
        for name in mine
        if name in theirs and mine[name].hash != theirs[name].hash
    }
    if not gaps:
        return
    beyond = _beyond_rounding(kind, step, mine, gaps, epsilon, moved)
    for name in sorted(gaps, key=lambda name: name not in beyond):
        yield Difference(step, kind, name, mine[name].hash, theirs[name].hash, name in beyond)


def _beyond_rounding(
    kind: Kind, step: int, mine: Mapping[str, TensorSketch], gaps: Mapping[str, float], epsilon: float, moved: float
) -> set[str]:
    """Return tensors beyond rounding: any gradient or buffer in step 0, later the worst if the sum exceeds a limit."""
    if step < 0:
        return set(gaps)  # nothing has been computed yet
    limit = _limit(epsilon, step, _LATER_TENSORS)
    norms = [tensor.norm for tensor in mine.values()]
    if step == 0 and kind in ("gradient", "buffer"):
        small = _SMALL * max(norms)
        return {name for name in gaps if gaps[name] > limit * max(mine[name].norm, small)}
    norm = math.hypot(*norms)
    allowed = {
        "gradient": limit * norm,
        "buffer": limit * norm,
        "parameter": _STATE * moved + 10 * epsilon * norm,
        "optimizer": _STATE * norm,
    }[kind]
    worst = max(gaps, key=lambda name: gaps[name])
    return {worst} if math.hypot(*gaps.values()) > allowed else set()


def _slots(state: Mapping[str, TensorSketch], kind: Kind) -> set[str]:
    """Return the slots of an optimizer (``/exp_avg``, ...), which are compared separately. Other kinds have one."""
    return {_slot(name) for name in state if name.startswith(f"{kind}/")}


def _slot(name: str) -> str:
    return "/" + name.rpartition("/")[2] if name.startswith("optimizer/") else ""


def _part(state: Mapping[str, TensorSketch], kind: Kind, slot: str) -> dict[str, TensorSketch]:
    return {
        name.removeprefix(f"{kind}/"): tensor
        for name, tensor in state.items()
        if name.startswith(f"{kind}/") and _slot(name) == slot
    }


def _distance(start: Mapping[str, TensorSketch], now: Mapping[str, TensorSketch], prefix: str) -> float:
    names = [name for name in start if name.startswith(prefix) and name in now]
    return math.hypot(*(now[name].projection - start[name].projection for name in names))


def _gap(one: float | None, two: float | None) -> float:
    if one is None or two is None:
        return 0.0 if one is two else math.inf
    if _both_nan(one, two) or one == two:
        return 0.0
    distance = abs(one - two)
    return math.inf if math.isnan(distance) else distance


def _both_nan(one: float | None, two: float | None) -> bool:
    return one is not None and two is not None and math.isnan(one) and math.isnan(two)


def _loss_scale(loss: float | None, reference: RunTrace) -> float:
    """Return the scale for differences in loss: the loss, but at least 1 % of the first loss."""
    first = next((record.loss for record in reference.records if record.loss is not None), 0.0)
    return max(abs(loss or 0.0), 0.01 * abs(first))
