"""Start from weights on disk: rank 0 reads them, and sends all workers those that fit the model."""

from __future__ import annotations

import logging

import torch

from paceline.errors import CheckpointError, PacelineError
from paceline.recovery.state_transfer import StateBytes, transfer
from paceline.step.job import Job
from paceline.weights.match import Matched, match
from paceline.weights.read import read

_log = logging.getLogger("paceline")


def load_initial(job: Job) -> None:
    """Give the model of each worker the weights that the settings name; all workers call this together.

    Raises:
        CheckpointError: they cannot be read, or do not fit; on all workers alike.
        WorkerLost: a worker was lost meanwhile.
    """
    world, model, settings = job.world, job.compute.model, job.settings.weights
    assert settings.path is not None
    matched: Matched | None = None
    said = "", ""
    if world.rank == 0:
        try:
            given = read(settings.path, settings.key)
            rules = {"rename": settings.rename, "skip": settings.skip}
            matched = match(model, given, settings.path, strict=settings.strict, **rules)
            said = matched.describe(settings.path), ""
        except PacelineError as error:
            said = "", str(error)
    said = world.gather(said, "start")[0]
    if said[1]:
        raise CheckpointError(said[1])
    tensors = {} if matched is None else matched.tensors
    if world.size > 1:
        received = transfer(world, [0], None if matched is None else StateBytes(tensors, None))
        tensors = dict(received.tensors) if received is not None else tensors
    with torch.no_grad():
        model.load_state_dict(tensors, strict=False)
    if said[0] not in job.learned.warnings:
        job.learned.warnings.append(said[0])
        _log.log(logging.WARNING if ";" in said[0] and world.rank == 0 else logging.INFO, said[0])
        job.events.mark("note", text=said[0])
