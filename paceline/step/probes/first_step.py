"""Probes before the first step."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.data.feed import MicrobatchGroup
from paceline.step.context import TrainingContext
from paceline.step.probes.coupling import check_coupling
from paceline.step.probes.loss_reduction import check_loss_reduction
from paceline.step.probes.repeatability import check_repeatable


def try_forward_pass(context: TrainingContext, groups: Sequence[MicrobatchGroup], step: int) -> None:
    """Probe the forward pass and the loss once in a run, unless other workers change the weights meanwhile.

    All workers call this together, each with its own groups. A worker without groups probes a microbatch
    that it can load, if any.

    Raises:
        InputError: the forward pass depends on earlier computations, or the loss is not a mean, and the run is to
            stop. Otherwise the probe warns.
        WorkerLost: a worker was lost meanwhile.
    """
    if context.probe_results.repeatable:
        return
    if context.settings.exact or context.replicated:
        _probe(context, groups, step)
    context.probe_results.repeatable = True


def _probe(context: TrainingContext, groups: Sequence[MicrobatchGroup], step: int) -> None:
    groups = groups or context.feed.load(*context.order.example(step))
    if groups and check_repeatable(context, groups[0], step):
        check_loss_reduction(context, groups, step)
        if context.compute.batch_loss is None:  # else it is meant to look at several samples
            check_coupling(context, groups, step)
    buffers = context.compute.buffers
    if context.world.size > 1 and buffers.may_count:
        for names in context.world.gather(sorted(buffers.added), "step"):
            buffers.added.update(names)
