"""Probes before the first step."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.data.feed import Piece
from paceline.step.job import Job
from paceline.step.trials.counting import check_counting
from paceline.step.trials.coupling import check_coupling
from paceline.step.trials.repeatability import check_repeatable


def try_forward_pass(job: Job, pieces: Sequence[Piece], step: int) -> None:
    """Probe the forward pass and the loss, unless other workers change the weights meanwhile.

    All workers call this together, each with its own microbatch groups. A worker with no groups probes microbatch 0.

    Raises:
        InputError: the forward pass depends on earlier computations, or the loss is not a mean, and the run is to
            stop. Otherwise the probe warns.
        WorkerLost: a worker was lost meanwhile.
    """
    if not (job.settings.exact or job.replicated):
        return
    pieces = pieces or job.feed.load(step, [range(1)])
    if check_repeatable(job, pieces[0], step):
        check_counting(job, pieces, step)
        check_coupling(job, pieces, step)
    buffers = job.compute.buffers
    if job.world.size > 1 and buffers.may_count:
        for names in job.world.gather(sorted(buffers.added), "step"):
            buffers.added.update(names)
