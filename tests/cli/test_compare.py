import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.diagnostics.verify.compare import compare
from paceline.diagnostics.verify.run_trace import RunTrace, StepTrace, TensorSketch

Change = Callable[[StepTrace], StepTrace]


def tensor(value: float) -> TensorSketch:
    return TensorSketch(value.hex(), abs(value), value)


def record(step: int) -> StepTrace:
    """A run whose weight goes from 1 towards 0."""
    if step < 0:
        return StepTrace(-1, state={"parameter/w": tensor(1.0), "buffer/mean": tensor(0.5)})
    value = 0.9 ** (step + 1)
    state = {"parameter/w": value, "buffer/mean": 0.5 + 0.01 * step, "optimizer/w/exp_avg": value}
    return StepTrace(
        step,
        loss=value,
        samples=8 * (step + 1),
        learning_rate=0.1,
        state={name: tensor(number) for name, number in state.items()},
        gradient={"w": tensor(value), "tiny": tensor(1e-9)},
    )


def recorded(change: Change = lambda one: one, steps: int = 10, **fields: object) -> RunTrace:
    return RunTrace(tuple(change(record(step)) for step in range(-1, steps)), **fields)  # type: ignore[arg-type]


def off(part: str, name: str, by: float, first: int = 0) -> Change:
    """Multiply a tensor by ``1 + by`` from a step on."""

    def change(one: StepTrace) -> StepTrace:
        tensors = getattr(one, part)
        if one.step < first or name not in tensors:
            return one
        return replace(one, **{part: {**tensors, name: tensor(tensors[name].projection * (1 + by))}})

    return change


def loss_off(by: float, first: int = 0) -> Change:
    return lambda one: replace(one, loss=one.loss * (1 + by)) if one.loss and one.step >= first else one


def together(*changes: Change) -> Change:
    def change(one: StepTrace) -> StepTrace:
        for each in changes:
            one = each(one)
        return one

    return change


def test_identical() -> None:
    assert compare(recorded(), recorded()).result == "identical"


@pytest.mark.parametrize(
    "change",
    [
        off("gradient", "w", 1e-6),
        off("gradient", "w", 1e-3, first=3),
        off("gradient", "tiny", 1.0),  # a gradient of nothing but rounding
        off("state", "parameter/w", 1e-7),
        off("state", "buffer/mean", 1e-6),
        off("state", "optimizer/w/exp_avg", 1e-3),
        loss_off(1e-6),
        loss_off(1e-4, first=3),
    ],
)
def test_rounding(change: Change) -> None:
    found = compare(recorded(), recorded(change))
    assert found.result == "rounding"
    assert found.first is not None
    assert "exact=true" in found.cause


def test_rounding_with_exact_and_with_other_threads() -> None:
    change = off("gradient", "w", 1e-6)
    assert "not deterministic" in compare(recorded(exact=True), recorded(change, exact=True)).cause
    assert "2 threads" in compare(recorded(threads=2), recorded(change, threads=1)).cause


@pytest.mark.parametrize(
    ("change", "place", "cause"),
    [
        (off("state", "parameter/w", 1e-9, first=-1), "parameter w before step 0", "torch.manual_seed"),
        (lambda one: replace(one, samples=7), "samples before step 0", "numbers of samples"),
        (lambda one: replace(one, learning_rate=0.2), "learning rate before step 0", "scale_lr"),
        (loss_off(0.1), "loss of step 0", "the worker that computes it"),
        (loss_off(0.1, first=4), "loss of step 4", "data set"),
        (off("gradient", "w", 1e-2), "gradient w of step 0", "losses agree, but the gradients"),
        (off("gradient", "w", 0.2, first=4), "gradient w of step 4", "short last batch"),
        (off("state", "parameter/w", 0.1), "parameter w of step 0", "update does not"),
        (off("state", "optimizer/w/exp_avg", 0.5), "optimizer w/exp_avg of step 0", "update does not"),
        (off("state", "buffer/mean", 0.1), "buffer mean of step 0", "Only buffers"),
    ],
)
def test_different(change: Change, place: str, cause: str) -> None:
    found = compare(recorded(), recorded(change))
    assert found.result == "different"
    assert str(found.beyond) == place
    assert cause in found.cause


def test_a_sudden_difference_after_rounding_is_told_from_drift() -> None:
    rounding = together(off("gradient", "w", 1e-6), off("state", "parameter/w", 1e-7))
    sudden = compare(recorded(), recorded(together(rounding, loss_off(0.1, first=6))))
    assert "data set" in sudden.cause

    def drifting(one: StepTrace) -> StepTrace:
        return off("state", "parameter/w", 1e-6 * 8.0**one.step)(loss_off(1e-6 * 8.0**one.step)(one))

    assert "amplifies rounding" in compare(recorded(), recorded(drifting)).cause


def test_other_batch_other_length_other_names() -> None:
    assert "batch_per_worker" in compare(recorded(batch=8), recorded(lambda one: replace(one, samples=9))).cause
    shorter = compare(recorded(), recorded(steps=9))
    assert (shorter.result, str(shorter.beyond)) == ("different", "end of step 9")
    unnamed = compare(recorded(), recorded(lambda one: replace(one, gradient={})))
    assert "in one run only" in unnamed.cause


def test_not_a_number() -> None:
    def nan(one: StepTrace) -> StepTrace:
        return replace(one, loss=math.nan, gradient={"w": TensorSketch("nan", math.nan, math.nan)})

    assert compare(recorded(nan), recorded(nan)).result == "identical"
    assert compare(recorded(), recorded(nan)).result == "different"


def test_the_fingerprint_is_of_the_last_state() -> None:
    assert recorded().fingerprint() == recorded(loss_off(0.1)).fingerprint()
    assert recorded().fingerprint() != recorded(off("state", "parameter/w", 1e-9, first=9)).fingerprint()
