"""Probe for coupled samples: whether a loss over several samples is the mean of the losses of their parts.

::

    samples         0 1 2 3        0 1 | 2 3
    mean               x        =   (a + b) / 2
    contrastive        x        >   (a + b) / 2      fewer samples to compare with in each half
    weighted mean      x       !=   (a + b) / 2      the halves have other weights

A batch is computed in microbatches, so only the first kind equals the script's loss on the whole batch. The probe does
not report batch norm, which uses its running statistics during the probe.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import STEP, seed_all
from paceline.data.nested import concatenated, map_tensors, rows
from paceline.step.context import TrainingContext
from paceline.step.loss import is_of_loss, loss_of_result, pair_of
from paceline.step.probes.draws import RecordedDraws
from paceline.step.probes.loss_reduction import has_rows
from paceline.step.probes.probe import warn, without_trace
from paceline.step.probes.repeatability import differing_text
from paceline.system.torch_internals import AnyNorm

_log = logging.getLogger("paceline")
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_TOLERANCE_HALF = 1e-2
_TEXT = (
    "The loss looks at several samples at once: for {samples} samples it is {whole:.5g}, and for two parts of them "
    "{halves:.5g} on average. So with {microbatches} microbatches it is not the loss of the whole batch, on any number "
    "of workers. If it is a weighted mean, as with class weights or ignore_index, return the pair (sum, count). If it "
    "compares samples, as contrastive losses do, give it as batch_loss=, which gets the outputs of the whole batch."
)


def check_coupling(context: TrainingContext, groups: Sequence[MicrobatchGroup], step: int) -> None:
    """Warn if the loss of some samples is not the mean over their parts. Leaves no trace."""
    if context.compute.carried is not None or context.order.microbatches == 1 or not all(map(has_rows, groups)):
        return
    data = concatenated([group.data for group in groups[:2]])
    samples = sum(group.samples for group in groups[:2])
    if data is None or samples < 2:
        return
    cuts = {groups[0].samples if len(groups) > 1 else samples // 2, samples // 3} - {0}
    for gradients in (False, True):  # gradients take memory, so only if the forward pass needs them
        try:
            with torch.set_grad_enabled(gradients):
                text = _probe(context, data, samples, sorted(cuts), step)
            break
        except Exception as error:  # noqa: BLE001 - the forward pass may raise anything for other samples
            _log.debug("the loss of several microbatches at once could not be computed: %s", error)
            text = ""
    if text:
        warn(context, text + ("" if False in context.probe_results.told else _broadcast(context, data)))


def _broadcast(context: TrainingContext, data: Any) -> str:
    """Explain that output and target broadcast to all pairs of samples. Empty if they do not, or if that is unknown."""
    if not is_of_loss(context.compute.forward):
        return ""
    try:
        with without_trace(context), torch.no_grad(), context.compute.precision():
            features, target = pair_of(data)
            output = context.compute.model(features)
        whole = torch.broadcast_shapes(output.shape, target.shape)
    except Exception:  # noqa: BLE001 - output and target may be anything
        return ""
    if not target.is_floating_point() or whole.numel() <= max(output.numel(), target.numel()):
        return ""
    return (
        f" The usual cause: the output has the shape {list(output.shape)} and the target {list(target.shape)}, so "
        f"their difference has the shape {list(whole)}: it pairs each sample with every other. Give both the same "
        f"shape, for example by output.squeeze(1)."
    )


def _probe(context: TrainingContext, data: Any, samples: int, cuts: Sequence[int], step: int) -> str:
    """Return a message if, for one of the cuts, the loss of the samples is not the mean over the two parts."""
    draws = RecordedDraws()
    eager = torch.compiler.set_stance("force_eager")  # torch.compile never compiles a frame seen in a dispatch mode
    with without_trace(context) as probe, eager, _learned_statistics(context):

        def loss_and_count(first: int, last: int) -> list[float]:
            context.compute.buffers.put_back()
            seed_all(context.compute.seed(STEP, step, 0))
            part = map_tensors(torch.clone, rows(data, first, last))  # the forward pass may change it
            with context.compute.precision(), draws.pass_of(partial(_part, start=first, stop=last)):
                value = context.compute.forward(context.compute.model, part)
            found = [float(one) for one in loss_of_result(value, last - first).pair()[:2]]
            probe.restore_weights()
            return found

        total, count = loss_and_count(0, samples)
        for cut in cuts:
            halves = [loss_and_count(0, cut), loss_and_count(cut, samples)]
            if draws.unknown or not count or not all(one[1] for one in halves) or not math.isfinite(total):
                continue
            whole, mean = total / count, sum(one[0] for one in halves) / sum(one[1] for one in halves)
            size = max(abs(whole), *(abs(one[0] / one[1]) for one in halves))
            if abs(whole - mean) > _tolerance(context) * size:
                again = loss_and_count(0, samples)
                break
        else:
            return ""
    if again[1] and abs(again[0] / again[1] - whole) > _tolerance(context) * size:  # differs without other samples, too
        if False in context.probe_results.told:
            return ""
        context.probe_results.told.add(False)
        return differing_text("the loss", [])
    return _TEXT.format(samples=samples, whole=whole, halves=mean, microbatches=context.order.microbatches)


def _tolerance(context: TrainingContext) -> float:
    if context.settings.autocast:
        return _TOLERANCE_HALF
    return max(_TOLERANCE.get(value.dtype, _TOLERANCE_HALF) for value in context.update.parameters.values())


@contextmanager
def _learned_statistics(context: TrainingContext) -> Iterator[None]:
    """Make batch norm use its running statistics in this context."""
    norms = [one for one in context.compute.model.modules() if isinstance(one, AnyNorm) and one.training]
    for one in norms:
        one.training = False
    try:
        yield
    finally:
        for one in norms:
            one.training = True


def _part(before: torch.Tensor, shape: torch.Size, start: int, stop: int) -> torch.Tensor | None:
    """Return the random numbers of samples ``start`` to ``stop``, or None if the numbers do not belong to samples."""
    if shape == before.shape:
        return before
    some = before.ndim and shape == (stop - start, *before.shape[1:]) and stop <= len(before)
    return before[start:stop] if some else None
