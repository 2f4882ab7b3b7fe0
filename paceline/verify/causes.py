"""Why two runs part, in words: one rule for each place where it shows."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.verify.difference import Difference
from paceline.verify.run_trace import RunTrace, StepTrace, TensorSketch

_JUMP = 100
_NEAR = 1e3  # times epsilon

_MODEL = (
    "The model is not the same before the first step. It is built with other random numbers in each run, "
    "or depends on the number of workers: call torch.manual_seed before building it."
)
_BATCH = (
    "The batch grows with the workers: batch_per_worker asks for that. Give batch, the samples per step "
    "over all workers."
)
_SAMPLES = (
    "The steps do not take the same number of samples: the data set, or the batch, depends on the number of workers."
)
_RATE = (
    "The learning rate depends on the number of workers: scale_lr asks for that, or the script computes "
    "it from the world size."
)
_FORWARD = (
    "The weights are equal but the loss is not, so the forward pass depends on which worker computes it: "
    "random numbers other than torch's, random's or numpy's global ones, the time, the rank, or a layer "
    "that mixes the samples of a batch."
)
_DATA = (
    "The weights agree up to here but this step's loss is not. The data set gives another sample for "
    "the same index when another worker asks (its own counter or random generator), or the forward pass "
    "keeps state of its own."
)
_GRADIENT = (
    "The losses agree but the gradients do not: the loss is not a mean over the samples it is given (a "
    "sum, or a mean over something else), microbatches of different sizes are not weighted by their "
    "samples (a short last batch), or a hook or custom autograd function depends on the worker."
)
_UPDATE = (
    "The gradients agree but the update does not: the optimizer or the schedule uses something of its own "
    "worker, such as the rank, a local clip or random numbers."
)
_BUFFERS = (
    "Only buffers differ by more than rounding: a normalisation layer keeps statistics of the samples its "
    "own worker saw, or a buffer counts forward passes."
)
_END = "One run ended before the other: the number of steps depends on the number of workers (the script's own loop?)."
_NAMES = "A tensor is in one run only: the model is built differently, or a parameter is used in one run only."
_DRIFT = (
    "The runs differ by rounding first and then by more: the training amplifies rounding (a large "
    "learning rate), or something small differs. `--set exact=true` decides: it removes the rounding."
)


def of_difference(reference: RunTrace, other: RunTrace, bits: Difference, beyond: Difference) -> str:
    """Why the first difference beyond rounding is there."""
    if beyond.reference in (True, False) and beyond.kind in ("gradient", "parameter", "buffer", "optimizer"):
        return _NAMES
    by_kind = {"end": _END, "samples": _SAMPLES, "learning rate": _RATE}
    if beyond.kind in by_kind:
        return _BATCH if beyond.kind == "samples" and reference.batch != other.batch else by_kind[beyond.kind]
    if beyond.step < 0:
        return _MODEL
    if bits.step < beyond.step and beyond.kind != "buffer" and not _sudden(reference, other, beyond):
        return _DRIFT
    if beyond.kind == "loss":
        return _FORWARD if beyond.step == 0 else _DATA
    return {"gradient": _GRADIENT, "parameter": _UPDATE, "optimizer": _UPDATE, "buffer": _BUFFERS}[beyond.kind]


def _sudden(reference: RunTrace, other: RunTrace, beyond: Difference) -> bool:
    """Whether the difference came from one step to the next; amplified rounding grows little by little."""
    (before, twin), (now, now_twin) = (
        [next(record for record in trace.records if record.step == step) for trace in (reference, other)]
        for step in (beyond.step - 1, beyond.step)
    )
    if beyond.kind == "loss":
        size = math.hypot(*(tensor.norm for tensor in before.state.values()))
        weights_agree = _gap(before.state, twin.state) <= _NEAR * reference.epsilon * size
        return weights_agree and _loss_gap(now, now_twin) > _JUMP * _loss_gap(before, twin)
    if beyond.kind == "gradient":
        return _gap(now.gradient, now_twin.gradient) > _JUMP * _gap(before.gradient, twin.gradient)
    return _gap(now.state, now_twin.state) > _JUMP * _gap(before.state, twin.state)


def _loss_gap(one: StepTrace, two: StepTrace) -> float:
    return abs((one.loss or 0.0) - (two.loss or 0.0))


def _gap(one: Mapping[str, TensorSketch], two: Mapping[str, TensorSketch]) -> float:
    return math.hypot(*(one[name].projection - two[name].projection for name in one if name in two))


def of_rounding(reference: RunTrace, other: RunTrace) -> str:
    """Why runs that train the same still differ in bits."""
    if reference.exact and other.exact:
        return (
            "exact=true is on and the bits differ all the same: an operation is not deterministic, or its "
            "result depends on how many samples it gets at once."
        )
    if reference.threads != other.threads:
        return (
            f"Sums are added in another order, also because a worker computes with {reference.threads} "
            f"threads in one run and with {other.threads} in the other. `--set exact=true` gives the same "
            "bits."
        )
    return "Sums are added in another order. `--set exact=true` gives the same bits."
