"""Training phases: several losses in turn on a batch, each for the parameters of its own optimizer.

::

    batch 7    phase "D"    loss of D, gradients of D's parameters, update of D
               phase "G"    loss of G, gradients of G's parameters, update of G
    batch 8    phase "D"    ...

In a phase the parameters of other optimizers do not require a gradient: the forward pass uses them, but nothing is
stored or sent for them. Each phase has its own random numbers, which depend on its index within the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from paceline.comm.collectives.all_gather import AllGather
from paceline.comm.collectives.step_header import PHASE_TAG
from paceline.data.feed import MicrobatchGroup
from paceline.errors import ConfigError, DisagreementError, InputError
from paceline.settings import Settings
from paceline.step.context import ProbeResults, StepResult, TrainingContext
from paceline.step.loss import Forward
from paceline.step.optimizer import OptimizerStep
from paceline.step.probes.first_step import try_forward_pass
from paceline.strategies.base import Capabilities, Strategy


class Phases(Strategy):
    """Strategy that runs the phases of a batch in the script's order, with a separate strategy for each phase."""

    def __init__(self, context: TrainingContext, build: Callable[[TrainingContext], Strategy]) -> None:
        self._context = context
        self._names = list(context.phases)
        self._contexts = {name: _context_of(context, name) for name in self._names}
        self._strategies = {name: build(one) for name, one in self._contexts.items()}
        context.warnings[:] = dict.fromkeys(context.warnings)
        self._chosen = AllGather(context.world, PHASE_TAG, 24, host=True)
        self._name, self._turn = self._names[0], 0

    def choose(self, name: str, turn: int) -> None:
        """Choose the phase of the next step; ``turn`` is the number of earlier phases on the same batch."""
        self._name, self._turn = name, turn

    def groups(self, step: int) -> list[range]:
        return self._strategies[self._names[0]].groups(step)

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        context = self._contexts[self._name]
        self._check_together(step)
        context.compute.turn = self._turn
        with self._training_only(context):
            try_forward_pass(context, groups, step)
            return self._strategies[self._name].step(step, groups)

    def _check_together(self, step: int) -> None:
        """Raise DisagreementError if workers are in different phases, because they would wait for each other."""
        if self._context.world.size == 1:
            return
        own = torch.tensor([step, self._names.index(self._name), self._turn])
        everyone = self._chosen.start(own).wait().tolist()
        if any(one != everyone[0] for one in everyone):
            listed = ", ".join(
                f"rank {rank} at step {step} with optimizer={self._names[place]!r}"
                for rank, (step, place, _) in enumerate(everyone)
            )
            raise DisagreementError(
                f"The workers are not in the same phase: {listed}. Every worker must take the same batches from "
                f"session.batches, and call session.step with the same optimizers in the same order."
            )

    @contextmanager
    def _training_only(self, context: TrainingContext) -> Iterator[None]:
        others = [
            value
            for name, value in self._context.update.parameters.items()
            if name not in context.update.parameters and value.requires_grad
        ]
        for value in others:
            value.requires_grad_(False)
        try:
            yield
        finally:
            for value in others:
                value.requires_grad_(True)

    def close(self) -> None:
        for one in self._strategies.values():
            one.close()


def _context_of(context: TrainingContext, name: str) -> TrainingContext:
    """Return the training context of a phase, with its loss and the parameters of its optimizer.

    Its microbatches are never fused, because workers that join do not get the probe results of a phase.
    """
    probe_results = ProbeResults(fusible=False, warnings=context.probe_results.warnings)
    compute, update = context.compute.of(context.phases[name]), context.update.of(name)
    return replace(context, compute=compute, update=update, probe_results=probe_results, phases={})


def named_forwards(
    forward: object, update: OptimizerStep, capabilities: Capabilities, settings: Settings
) -> dict[str, Forward]:
    """Return the forward passes by optimizer name, or an empty dict if a batch has a single loss."""
    if not isinstance(forward, Mapping):
        return {}
    names = update.names
    wrong = [name for name in [*forward, *names] if (name in forward) != (name in names)]
    if wrong or not names:
        raise InputError(
            f"forward has {', '.join(map(repr, forward)) or 'nothing'}, but the optimizers are "
            f"{', '.join(map(repr, names)) or 'one without a name'}: give each optimizer a forward of its name."
        )
    if not capabilities.phases:
        raise ConfigError(
            f"strategy {settings.strategy!r} takes one step for each batch, and cannot train with a forward for each "
            f"optimizer: use 'allreduce' or 'stealing'."
        )
    return dict(forward)
