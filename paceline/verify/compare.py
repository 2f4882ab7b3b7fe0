"""Did two runs train the same? Compares what they recorded step by step, and says why they part. No torch.

Two runs that add the same numbers in another order differ by rounding. How much that may be:

* In step 0 the weights are equal, so its loss and gradient differ by the rounding of sums only: some epsilon,
  of which cancellation makes tens, seldom hundreds. The limit is a thousand.
* From step 1 on the weights differ by rounding, and a few activations near zero fall on the other side of a
  ReLU. When a share s of the activations flips, the gradient moves by about sqrt(s), so the measure is the
  square root of epsilon. Training amplifies what is there: the limit doubles every five steps.
* Adam turns a gradient that is nothing but rounding (a bias before a normalisation) into a full step, so
  weights are held against how far they have moved.

Tried on small MLPs, CNNs and transformers, SGD and Adam, float32 and bfloat16, 30 steps, four orders: no
false alarm. Found: a gradient off by 0.1 % in step 0 or 5 % in step 7, half a batch in the statistics, noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.verify import causes
from paceline.verify.difference import Difference, Kind
from paceline.verify.run_trace import RunTrace, StepTrace, TensorSketch

Verdict = Literal["identical", "rounding", "different"]

_FIRST_STEP = 1e3  # times epsilon
_LATER_LOSS = 3.0  # times the square root of epsilon, doubling every _DOUBLING steps
_LATER_TENSORS = 30.0
_DOUBLING = 5
_CEILING = 0.25
_FIRST_CEILING = 0.02  # bfloat16: a thousand epsilon would allow anything
_OF_MOVEMENT = 0.1  # the part of their way that weights may differ by
_OF_OPTIMIZER = 0.1
_SMALL = 0.1  # a tensor much smaller than the largest one is held against this part of the largest


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found."""

    verdict: Verdict
    bits: Difference | None = None  # the first place where bits differ
    beyond: Difference | None = None  # the first place that differs by more than rounding
    cause: str = ""


def compare(reference: RunTrace, other: RunTrace) -> Comparison:
    """Compare two runs that should have trained the same."""
    places = list(_places(reference, other))
    if not places:
        return Comparison("identical")
    beyond = next((place for place in places if place.beyond), None)
    if beyond is not None:
        return Comparison("different", places[0], beyond, causes.of_difference(reference, other, places[0], beyond))
    return Comparison("rounding", places[0], None, causes.of_rounding(reference, other))


def _places(reference: RunTrace, other: RunTrace) -> Iterator[Difference]:
    """Every place where the two differ, in the order in which a step computes."""
    movement = 0.0
    start = reference.records[0].state
    for one, two in zip(reference.records, other.records, strict=False):
        limits = _Limits(reference.epsilon, one.step)
        for kind, value, twin in _numbers(one, two):
            if value != twin and not _both_nan(value, twin):
                beyond = kind != "loss" or _apart(value, twin) > limits.loss * _scale(value, reference)
                yield Difference(one.step, kind, "", value, twin, beyond)
        yield from _tensors("gradient", one.step, one.gradient, two.gradient, limits)
        movement = max(movement, _distance(start, one.state, "parameter/"))
        for kind in ("parameter", "buffer", "optimizer"):
            for slot in sorted(_slots(one.state, kind) | _slots(two.state, kind)):
                mine, theirs = _part(one.state, kind, slot), _part(two.state, kind, slot)
                yield from _tensors(kind, one.step, mine, theirs, limits, movement)
    short, long = sorted((len(reference.records), len(other.records)))
    if short != long:
        yield Difference(short - 1, "end", "", len(reference.records) - 1, len(other.records) - 1, True)


def _numbers(one: StepTrace, two: StepTrace) -> tuple[tuple[Kind, float | None, float | None], ...]:
    return (
        ("samples", one.samples, two.samples),
        ("learning rate", one.learning_rate, two.learning_rate),
        ("loss", one.loss, two.loss),
    )


class _Limits:
    """How far rounding may carry two runs apart by a step; see the top of this file."""

    def __init__(self, epsilon: float, step: int) -> None:
        self.epsilon = epsilon
        growth = math.sqrt(epsilon) * 2.0 ** (max(0, step) / _DOUBLING)
        first = min(_FIRST_CEILING, _FIRST_STEP * epsilon)
        self.step = step
        self.loss = first if step <= 0 else min(_CEILING, _LATER_LOSS * growth)
        self.tensors = first if step <= 0 else min(_CEILING, _LATER_TENSORS * growth)


def _tensors(
    kind: Kind,
    step: int,
    mine: Mapping[str, TensorSketch],
    theirs: Mapping[str, TensorSketch],
    limits: _Limits,
    movement: float = 0.0,
) -> Iterator[Difference]:
    """The tensors of one kind whose bits differ."""
    missing = sorted(mine.keys() ^ theirs.keys())
    if missing:
        yield Difference(step, kind, missing[0], missing[0] in mine, missing[0] in theirs, True)
    apart = {
        name: _apart(mine[name].projection, theirs[name].projection)
        for name in mine
        if name in theirs and mine[name].hash != theirs[name].hash
    }
    if not apart:
        return
    far = _too_far(kind, mine, apart, limits, movement)
    for name in sorted(apart, key=lambda name: name not in far):
        yield Difference(step, kind, name, mine[name].hash, theirs[name].hash, name in far)


def _too_far(
    kind: Kind, mine: Mapping[str, TensorSketch], apart: Mapping[str, float], limits: _Limits, movement: float
) -> set[str]:
    """The tensors further apart than rounding explains: each for itself, or the worst for all together."""
    if limits.step < 0:
        return set(apart)  # nothing has been computed yet
    norms = [tensor.norm for tensor in mine.values()]
    if limits.step == 0 and kind in ("gradient", "buffer"):
        small = _SMALL * max(norms)
        return {name for name in apart if apart[name] > limits.tensors * max(mine[name].norm, small)}
    whole = math.hypot(*norms)
    allowed = {
        "gradient": limits.tensors * whole,
        "buffer": limits.tensors * whole,
        "parameter": _OF_MOVEMENT * movement + 10 * limits.epsilon * whole,
        "optimizer": _OF_OPTIMIZER * whole,
    }[kind]
    worst = max(apart, key=lambda name: apart[name])
    return {worst} if math.hypot(*apart.values()) > allowed else set()


def _slots(state: Mapping[str, TensorSketch], kind: Kind) -> set[str]:
    """What an optimizer keeps (``/exp_avg``, ...): each is compared for itself. Other kinds have one part."""
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


def _apart(one: float | None, two: float | None) -> float:
    if one is None or two is None:
        return 0.0 if one is two else math.inf
    if _both_nan(one, two) or one == two:
        return 0.0
    distance = abs(one - two)
    return math.inf if math.isnan(distance) else distance


def _both_nan(one: float | None, two: float | None) -> bool:
    return one is not None and two is not None and math.isnan(one) and math.isnan(two)


def _scale(loss: float | None, reference: RunTrace) -> float:
    """What a loss is held against: itself, but not less than a part of the first one."""
    first = next((record.loss for record in reference.records if record.loss is not None), 0.0)
    return max(abs(loss or 0.0), 0.01 * abs(first))
