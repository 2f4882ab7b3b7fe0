"""Likely causes of differences between two runs, in words: one rule for each kind of the first difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.diagnostics.verify.run_trace import RunTrace, StepTrace, TensorSketch

Kind = Literal["end", "samples", "learning rate", "loss", "gradient", "parameter", "buffer", "optimizer"]


@dataclass(frozen=True)
class Difference:
    """Value that differs between two runs."""

    step: int  # step of the value, or -1 before the first step
    kind: Kind  # kind of the value
    name: str = ""  # name of the tensor, if the value is a tensor
    reference: object = None  # value in the reference run, the hash of a tensor, or whether a tensor exists
    other: object = None  # the same in the other run
    beyond: bool = False  # whether the difference exceeds rounding

    def __str__(self) -> str:
        what = f"{self.kind} {self.name}".strip()
        return f"{what} before step 0" if self.step < 0 else f"{what} of step {self.step}"


_JUMP = 100
_NEAR = 1e3  # times epsilon

_MODEL = (
    "The model differs before the first step: it is built with different random numbers in each run, or depends on "
    "the number of workers. Call torch.manual_seed before building it."
)
_BATCH = (
    "The batch grows with the number of workers, because batch_per_worker is set. Set batch instead: the samples per "
    "step over all workers."
)
_SAMPLES = "The steps use different numbers of samples: the data set or the batch depends on the number of workers."
_RATE = "The learning rate depends on the number of workers: scale_lr is set, or the script uses the world size."
_FORWARD = (
    "The weights are equal but the loss is not, so the forward pass depends on the worker that computes it: a random "
    "generator of its own (only the global ones of torch, random and numpy are seeded), the time, the rank, or a "
    "layer that mixes the samples of a batch."
)
_DATA = (
    "The weights agree up to here, but the loss of this step does not. The data set returns a different sample for the "
    "same index on another worker (a counter or random generator of its own), or the forward pass keeps state of its "
    "own."
)
_GRADIENT = (
    "The losses agree, but the gradients do not: the loss is not a mean over its samples (a sum, or a mean over "
    "something else), microbatches of different sizes are not weighted by their samples (a short last batch), or a "
    "hook or custom autograd function depends on the worker."
)
_UPDATE = (
    "The gradients agree, but the update does not: the optimizer or the schedule depends on the worker, for example "
    "through the rank, a local clip or random numbers."
)
_BUFFERS = (
    "Only buffers differ by more than rounding: a normalisation layer keeps statistics of its own worker's samples, "
    "or a buffer counts forward passes."
)
_END = "One run ended before the other: the number of steps depends on the number of workers. Check the script's loop."
_NAMES = "A tensor exists in one run only: the model is built differently, or a parameter is used in one run only."
_GROWTH = (
    "The runs differ by rounding first and by more later: training amplifies rounding (a large learning rate), or a "
    "small difference has another cause. `--set exact=true` tells which: it removes the rounding."
)


def of_difference(reference: RunTrace, other: RunTrace, first: Difference, beyond: Difference) -> str:
    """Return the likely cause of the first difference beyond rounding."""
    if beyond.reference in (True, False) and beyond.kind in ("gradient", "parameter", "buffer", "optimizer"):
        return _NAMES
    by_kind = {"end": _END, "samples": _SAMPLES, "learning rate": _RATE}
    if beyond.kind in by_kind:
        return _BATCH if beyond.kind == "samples" and reference.batch != other.batch else by_kind[beyond.kind]
    if beyond.step < 0:
        return _MODEL
    if first.step < beyond.step and beyond.kind != "buffer" and not _sudden(reference, other, beyond):
        return _GROWTH
    if beyond.kind == "loss":
        return _FORWARD if beyond.step == 0 else _DATA
    return {"gradient": _GRADIENT, "parameter": _UPDATE, "optimizer": _UPDATE, "buffer": _BUFFERS}[beyond.kind]


def _sudden(reference: RunTrace, other: RunTrace, beyond: Difference) -> bool:
    """Return whether the difference appeared in a single step. Amplified rounding grows gradually."""
    (before, twin), (now, now_twin) = (
        [next(record for record in trace.records if record.step == step) for trace in (reference, other)]
        for step in (beyond.step - 1, beyond.step)
    )
    if beyond.kind == "loss":
        size = math.hypot(*(tensor.norm for tensor in before.state.values()))
        weights_agree = _gap(before.state, twin.state) <= _NEAR * reference.epsilon * size
        return weights_agree and _loss_gap(now, now_twin) > _JUMP * _loss_gap(before, twin)
    if beyond.kind == "gradient":
        return _gap(now.gradient or {}, now_twin.gradient or {}) > _JUMP * _gap(
            before.gradient or {}, twin.gradient or {}
        )
    return _gap(now.state, now_twin.state) > _JUMP * _gap(before.state, twin.state)


def _loss_gap(one: StepTrace, two: StepTrace) -> float:
    return abs((one.loss or 0.0) - (two.loss or 0.0))


def _gap(one: Mapping[str, TensorSketch], two: Mapping[str, TensorSketch]) -> float:
    return math.hypot(*(one[name].projection - two[name].projection for name in one if name in two))


def of_rounding(reference: RunTrace, other: RunTrace) -> str:
    """Return why runs that train the same differ in bits."""
    if reference.exact and other.exact:
        return (
            "The bits differ although exact=true is set: an operation is not deterministic, or its result depends on "
            "how many samples it gets at once."
        )
    if reference.threads != other.threads:
        return (
            f"Sums are added in a different order, partly because a worker uses {reference.threads} threads in one run "
            f"and {other.threads} in the other. `--set exact=true` gives the same bits."
        )
    return "Sums are added in another order. `--set exact=true` gives the same bits."
