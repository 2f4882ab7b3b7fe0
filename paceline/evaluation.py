"""Measure a model on a data set: each sample exactly once, on any number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline import fault_points
from paceline.data.feed import KeyedDataset, LoadRequest, collated
from paceline.data.nested import default_collate
from paceline.data.prefetch import to_device
from paceline.errors import DisagreementError, InputError
from paceline.schedule.shares import even
from paceline.step.job import Job
from paceline.step.replicas import difference, digests, frozen

_LARGEST_CHUNK = 128
_EPOCH = -1


def evaluate(job: Job, steps: int, forward: Callable[[nn.Module, Any], Any], data: Any) -> tuple[float, int]:
    """Return the mean of ``forward(model, samples)`` over a data set.

    The data set is cut into chunks that do not depend on the number of workers, and each chunk is computed by one
    worker; so the result has the same bits on any number of workers (with as many threads each).

    Args:
        job: what is trained, and with whom.
        steps: how many steps are done.
        forward: returns the mean over the samples it is given, or a sum and a count.
        data: a map-style data set.

    Returns:
        the mean, and the notice of the workers (``comm.world``): whether the world is to change.

    Raises:
        InputError: the data set has no length or no samples, the value is no number, or a weight of the model changed.
        DisagreementError: the bits of the state are to be the same on all workers, and are not.
    """
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or len(data) == 0:
        raise InputError(
            f"evaluate needs a data set with a length, items by number, and at least one sample, not this "
            f"{type(data).__name__}."
        )
    chunks = even(len(data), -(-len(data) // _chunk(job)))
    own = even(len(chunks), job.world.size)[job.world.rank]
    read = KeyedDataset(data, job.settings.seed, collates=job.collate is not None)
    collate = job.collate or default_collate
    sums = digests(job) if job.settings.exact and job.world.size > 1 else frozen(job)
    training = {module: module.training for module in job.compute.model.modules()}
    job.compute.model.eval()
    pairs = []
    buffers = job.compute.buffers
    buffers.take_all()
    try:
        with torch.no_grad(), job.update.averages.in_place():
            for chunk in chunks[own.start : own.stop]:
                items = to_device(
                    collated(read.__getitems__(LoadRequest(_EPOCH, list(chunk))), collate), job.world.device
                )
                with job.compute.precision(), job.compute.keeping_weights():
                    value = forward(job.compute.model, items)
                pairs.append(_sum_and_count(value, len(chunk)))
                buffers.put_all_back()
    finally:
        for module, mode in training.items():
            module.training = mode
    fault_points.reach("in evaluate", steps)
    everyone = job.world.gather((pairs, job.world.notice(), sums), "evaluate")
    differs = difference([sums for *_, sums in everyone])
    if differs:
        raise DisagreementError(differs)
    pairs = [pair for pairs, *_ in everyone for pair in pairs]
    count = math.fsum(pair[1] for pair in pairs)
    if count == 0:
        raise InputError("The metric counted nothing in the whole data set: the sum of its counts is 0.")
    return math.fsum(pair[0] for pair in pairs) / count, max(notice for _, notice, _ in everyone)


def _chunk(job: Job) -> int:
    microbatch = -(-job.order.batch // job.order.microbatches)
    return max(microbatch, min(job.order.batch, _LARGEST_CHUNK))


def _sum_and_count(value: Any, samples: int) -> tuple[float, float]:
    try:
        if isinstance(value, tuple):
            total, count = value
            return float(total), float(count)
        return float(value) * samples, float(samples)
    except (TypeError, ValueError, RuntimeError):
        got = (
            f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        )
        raise InputError(
            f"The metric must return a number, the mean over the samples it is given, or a pair (sum, count), "
            f"but it returned {got}."
        ) from None
