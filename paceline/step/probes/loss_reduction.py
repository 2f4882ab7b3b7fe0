"""Probe of the loss: whether a scalar is a mean over the samples, and a pair a sum with its divisor.

::

                         a third of a microbatch  twice the same    three times
    mean                                     x                 x              x
    sum and count                         s, n            2s, 2n         3s, 3n
    reduction="sum"                          s                2s             3s     wrong: read as a mean
    loss, accuracy                        x, a              x, a           x, a     wrong: read as sum and count

A loss over pairs of samples, such as a contrastive loss, matches no row and is accepted. Repeated samples get the
random numbers of their first pass, in dropout and elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import STEP, seed_all
from paceline.data.nested import concatenated, leaves_in, map_tensors, rows
from paceline.errors import InputError
from paceline.step.context import TrainingContext
from paceline.step.loss import is_counted, sum_and_count
from paceline.step.probes.draws import RecordedDraws
from paceline.step.probes.probe import warn, without_trace

_CERTAIN, _CERTAIN_HALF, _LIKELY = 1e-3, 1e-2, 5e-2
"""Relative tolerances: for rounding in float32, for rounding in 16-bit types, and for random numbers."""
_OTHERS = 3
_SUM = (
    "The loss grows with the number of samples, as with reduction='sum': {values} for the same samples once, twice and "
    "three times. A scalar is taken as the mean over its samples, so gradients would be {parts} times too small for "
    "a sum over the batch, and also too large for a mean. Return a mean, or the pair (sum, count)."
)
_MEAN = (
    "The forward pass returns the pair (loss, count), whose first value must be a sum, but it stays {values} when the "
    "same samples are given once, twice and three times, while the count grows. Return the mean alone, or the sum with "
    "its count."
)
_NO_COUNT = (
    "The forward pass returns a pair of scalars, which means (sum, count), but the second value is not a count: "
    "{values} for the same samples once, twice and three times{more}. The loss would be divided by it. Return a metric "
    "beside the loss by its name, as in (loss, {{'accuracy': value}})."
)
_QUEUE = (
    "The forward pass puts samples into the buffer {name!r}, as if it were a queue. A batch is computed in "
    "{microbatches} microbatches, each from the buffers at the start of the step, and a buffer becomes the mean of its "
    "values after them, which is not a queue. Keep the queue outside of the model and fill it in the loop; or set "
    "microbatches=1, for one worker."
)
_NOT_TRIED = (
    "The loss could not be checked: the forward pass raised {error} when it was given some samples of a microbatch "
    "once, twice and three times. Training continues. Make sure that it returns a mean over its samples, or the pair "
    "(sum, count)."
)


def check_loss_reduction(context: TrainingContext, groups: Sequence[MicrobatchGroup], step: int) -> None:
    """Compute the loss of some samples given once, twice and three times, and leave no trace.

    Raises:
        InputError: the loss is certainly not a mean. If that is only likely, the probe warns.
    """
    if context.compute.carried is not None:
        return
    failed = ""
    for gradients in (False, True):  # gradients take memory, so only if the forward pass needs them
        try:
            with torch.set_grad_enabled(gradients):
                text, certain = _probe(context, groups, step)
            break
        except Exception as error:  # noqa: BLE001 - the forward pass may raise anything for other samples
            failed = f"{type(error).__name__}: {error}"
    else:
        if context.compute.batch_loss is None:
            warn(context, _NOT_TRIED.format(error=failed))
        return
    if certain:
        raise InputError(text)
    if text:
        warn(context, f"{text} It is not certain, so training continues.")


def _probe(context: TrainingContext, groups: Sequence[MicrobatchGroup], step: int) -> tuple[str, bool]:
    """Return a message about what is wrong with the loss, or "", and whether that is certain."""
    first = groups[0]
    if not has_rows(first):
        return "", False
    third = -(-first.samples // 3)  # three thirds take the memory of a microbatch
    third = min(first.samples, third + third % 2)  # even, for a loss over pairs
    part = rows(first.data, 0, third)
    draws = RecordedDraws()
    eager = torch.compiler.set_stance("force_eager")  # torch.compile never compiles a frame seen in a dispatch mode
    with without_trace(context) as probe, eager:

        def computed(data: Any) -> tuple[float, float, bool]:
            found = _computed(context, data, step)
            probe.restore_weights()
            return found

        values, buffers = [], []
        for times in (1, 2, 3):
            with draws.pass_of(_repeated):
                values.append(computed(concatenated([part] * times)))
            buffers.append(context.compute.buffers.grown())
        if any(grown.any() for grown in buffers[0].values()):
            _check_buffers(context, buffers, _grown_twice(context, part, step))
        totals, counts = [value for value, *_ in values], [count for _, count, _ in values]
        if not values[0][2]:
            return _of_scalar(context, totals)
        if _closeness(context, counts, grows=True):
            return _of_counted(context, totals, counts)
        parts = [rows(first.data, third, first.samples)] if first.samples > third else []
        parts += [group.data for group in groups[1 : 1 + _OTHERS] if has_rows(group)]
        return _of_uncounted(context, totals, counts, [computed(data)[1] for data in parts])


def _grown_twice(context: TrainingContext, data: Any, step: int) -> dict[str, torch.Tensor]:
    """Return the growth of the buffers in two consecutive passes over the same samples."""
    _computed(context, data, step)
    _computed(context, data, step, goes_on=True)
    return context.compute.buffers.grown()


def _check_buffers(
    context: TrainingContext, grown: Sequence[dict[str, torch.Tensor]], after: dict[str, torch.Tensor]
) -> None:
    """Find the buffers that grow with the number of samples, and warn about buffers that queue samples.

    Args:
        context: training context.
        grown: growth of the buffers with samples given once, twice and three times.
        after: growth in two consecutive passes, which is less than twice the first for an average that begins at zero.
    """
    once, twice, thrice = grown
    for name, grown_once in once.items():
        if not grown_once.any() or not grown_once.isfinite().all() or name not in twice or name not in thrice:
            continue
        added = [*zip((twice, thrice, after), (2, 3, 2), strict=True)]
        if all(torch.allclose(found.get(name, grown_once), times * grown_once) for found, times in added):
            context.compute.buffers.added.add(name)
        elif grown_once.count_nonzero() < twice[name].count_nonzero() < thrice[name].count_nonzero():
            warn(context, _QUEUE.format(name=name, microbatches=context.order.microbatches))


def _computed(context: TrainingContext, data: Any, step: int, goes_on: bool = False) -> tuple[float, float, bool]:
    """Return the loss as ``forward`` gave it, a count, and whether ``forward`` gave the count.

    ``goes_on``: start from the current buffers instead of the buffers at the start of the step.
    """
    compute = context.compute
    if not goes_on:
        compute.buffers.reset()
    seed_all(compute.seed(STEP, step, 0))
    with compute.precision():
        value = compute.forward(compute.model, map_tensors(torch.clone, data))  # it may change data
    compute.buffers.collect(1, 1)
    total, count = sum_and_count(value, 1)
    return float(total.detach()), float(torch.as_tensor(count).detach()), is_counted(value)


def _of_scalar(context: TrainingContext, totals: list[float]) -> tuple[str, bool]:
    closeness = _closeness(context, totals, grows=True)
    if not closeness or context.order.microbatches == 1:  # a sum over the whole batch is the same as in plain PyTorch
        return "", False
    return _SUM.format(values=_listed(totals), parts=context.order.microbatches), closeness == _certain(context)


def _of_counted(context: TrainingContext, totals: list[float], counts: list[float]) -> tuple[str, bool]:
    """Check a pair whose second value is a count."""
    closeness = _closeness(context, totals, grows=False)
    certain = closeness == _certain(context) == _closeness(context, counts, grows=True)
    return (_MEAN.format(values=f"{totals[0]:.4g}"), certain) if closeness else ("", False)


def _of_uncounted(
    context: TrainingContext, totals: list[float], counts: list[float], others: list[float]
) -> tuple[str, bool]:
    """Check a pair whose second value does not grow with the samples. ``others``: second values for other samples.

    Such a pair may be (mean, 1), a mean over microbatches, or have the number of classes that occur as its count.
    """
    if counts == [0.0] * 3 and not any(others):
        stays = totals[0] != 0 and bool(_closeness(context, totals, grows=False))
        return (_NO_COUNT.format(values=_listed(counts), more=""), False) if stays else ("", False)
    closeness = _closeness(context, counts, grows=False)
    varies = any(abs(other - counts[0]) > 1e-6 * abs(counts[0]) for other in others)
    numbers = (*counts, *others)
    fractional = any(number % 1 for number in numbers)
    if fractional and max(numbers) <= 1 and counts[2] < 2 * counts[0]:
        closeness = closeness or _LIKELY  # an accuracy among random numbers
    if not closeness or not (fractional or (varies and set(numbers) == {0.0, 1.0})):
        return "", False
    more = f", and {_listed(others)} for others" if varies else ""
    return _NO_COUNT.format(values=_listed(counts), more=more), varies and fractional and closeness == _certain(
        context
    ) and max(numbers) <= 1


def _closeness(context: TrainingContext, values: list[float], *, grows: bool) -> float:
    """Return the tolerance within which values grow with the samples, or stay the same. 0 if they do not."""
    wanted = [values[0] * (times if grows else 1) for times in (1, 2, 3)]
    for tolerance in (_certain(context), _LIKELY):
        if values[0] != 0 and all(
            abs(value - one) <= tolerance * abs(one) for value, one in zip(values, wanted, strict=True)
        ):
            return tolerance
    return 0.0


def _certain(context: TrainingContext) -> float:
    half = context.settings.autocast or any(
        value.dtype in (torch.float16, torch.bfloat16) for value in context.update.parameters.values()
    )
    return _CERTAIN_HALF if half else _CERTAIN


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def has_rows(group: MicrobatchGroup) -> bool:
    """Return whether the data are tensors whose first dimension is the sample dimension."""
    return all(
        isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == group.samples
        for leaf in leaves_in(group.data)
    )


def _repeated(before: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """Repeat the random numbers of some samples. Returns None if the numbers do not belong to samples."""
    times, rest = divmod(shape[0], len(before)) if len(shape) == before.ndim > 0 and len(before) else (0, 1)
    return None if rest or shape[1:] != before.shape[1:] else before.repeat(times, *[1] * (before.ndim - 1))
