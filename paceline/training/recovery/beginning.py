"""Start of training when no worker has a state: from a checkpoint, from weights on disk, or from the script's model."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.training_state import TrainingState
from paceline.checkpoint.weights.deferred.model import initial_hashes, materialize
from paceline.checkpoint.weights.match import Matched, match
from paceline.checkpoint.weights.read import read
from paceline.comm.collectives.agreement import compare
from paceline.errors import CheckpointError, PacelineError
from paceline.step.context import TrainingContext
from paceline.strategies.registry import lanes_of, prepare
from paceline.training.progress import Progress
from paceline.training.recovery.formation import Formation
from paceline.training.recovery.lost_shards import meet
from paceline.training.recovery.state_transfer import StateBytes, transfer

_log = logging.getLogger("paceline")
_INITIAL = "initial value"


@dataclass(frozen=True)
class Beginning:
    """Training context with its initial state."""

    context: TrainingContext  # training context, before the rendezvous
    formation: Formation  # forms the memberships of this worker
    run_spec: dict[str, object]  # values on which all workers must agree, by key
    state: TrainingState
    checkpointer: Checkpointer
    resume: str | None  # checkpoint to start from: a path, ``auto`` for the newest complete one, or None

    def begin(self) -> Progress:
        """Compare run specs, load the checkpoint or initial weights, and return the progress. All workers call this."""
        self._check()
        # In a later generation, all workers that had a state are lost: resume from the newest checkpoint.
        again = self.resume is None and self.context.world.generation > 0 and self.checkpointer.enabled
        steps = resume(self.context, self.checkpointer, self.state, "auto" if again else self.resume)
        meet(self.context, "start")
        if self.context.settings.weights.path is not None and self.checkpointer.last is None:
            load_initial(self.context)
        return Progress.resumed(steps, self.state.loaded_script if steps else {})

    def _check(self) -> None:
        """Compare the run specs of all workers. Values that are not computed yet are compared by their records.

        If records differ, the values may still be equal. Then every worker computes and hashes all of them.
        """
        world, model = self.context.world, self.context.compute.model
        everyone = world.gather(dict(self.run_spec), "start")
        initial = [{key: value for key, value in one.items() if key.startswith(_INITIAL)} for one in everyone]
        if any(one != initial[0] for one in initial):
            compare([{key: value for key, value in one.items() if not key.startswith(_INITIAL)} for one in everyone])
            materialize(model)
            self.run_spec.update({f"{_INITIAL} of {name}": value for name, value in initial_hashes(model).items()})
            everyone = world.gather(dict(self.run_spec), "start")
        compare(everyone)


def resume(context: TrainingContext, checkpointer: Checkpointer, state: TrainingState, source: str | None) -> int:
    """Load a checkpoint, as ``Checkpointer.resume`` does, in shares if the strategy divides the state."""
    state.shares = prepare(context)
    try:
        return checkpointer.resume(state, source)
    finally:
        state.shares = None
        errors, lanes = context.settings.keeps_errors, lanes_of(context)
        for name in [one for one in context.replicas if not lanes or ("/feedback/" in one) != errors]:
            del context.replicas[name]  # of another strategy or format, with which the run was saved


def load_initial(context: TrainingContext) -> None:
    """Read the configured weights on rank 0, and load them on all workers. All workers call this.

    Raises:
        CheckpointError: the weights cannot be read or do not match the model. Raised on all workers.
    """
    world, model, settings = context.world, context.compute.model, context.settings.weights
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
        for one in context.prepared:
            one.take_rows(tensors)
        model.load_state_dict(tensors, strict=False)
        for one in context.prepared:
            one.settle()
    if said[0] not in context.probe_results.warnings:
        context.probe_results.warnings.append(said[0])
        _log.log(logging.WARNING if ";" in said[0] and world.rank == 0 else logging.INFO, said[0])
        context.events.mark("note", text=said[0])
