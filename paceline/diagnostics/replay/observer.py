"""Observers of a replayed step: by anomaly mode, a profiler, a debugger, the loss of each sample, or a trace."""

from __future__ import annotations

import math
import os
import pdb
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from paceline.checkpoint.training_state import TrainingState
from paceline.data.feed import MicrobatchGroup, split_group
from paceline.data.keys import STEP, seed_all
from paceline.data.nested import rows
from paceline.diagnostics.replay.anomaly import find_anomaly, single
from paceline.diagnostics.verify.trace_writer import TraceWriter
from paceline.environments import env
from paceline.errors import ConfigError, NonFiniteLoss
from paceline.step.context import StepResult, TrainingContext
from paceline.step.loss import loss_given, pair_of, sum_and_count
from paceline.step.probes.probe import warn, without_trace
from paceline.strategies.base import Strategy
from paceline.system.regular_files import without_link

_ROWS = 25  # lines of the profile that are printed, by their own time


def observed(
    asked: env.Replay,
    context: TrainingContext,
    state: TrainingState,
    strategy: Strategy,
    step: int,
    groups: list[MicrobatchGroup],
) -> StepResult:
    """Take the step to replay with a strategy, and observe it."""
    take = partial(strategy.step, step, groups)
    if asked.observe in _OF_MICROBATCHES:
        if strategy.held is not None:
            raise ConfigError(f"--{asked.observe} needs the whole model on each worker: replay with --ranks 1.")
        if context.compute.batch_loss is not None or context.phases:
            raise ConfigError(f"--{asked.observe} needs one loss that is a mean over samples: give no batch_loss.")
        found = [
            finding
            for group in groups
            for one in split_group(group, context.order.parts_of(step))
            for finding in _OF_MICROBATCHES[asked.observe](context, step, one)
        ]
        context.events.mark(asked.observe, step=step, found=found)
        found_anywhere = any(context.world.gather(bool(found), "step"))
        try:
            return take()
        except NonFiniteLoss:
            if found_anywhere:
                end(context)
            raise
    if asked.observe == "trace":
        trace = TraceWriter(env.Trace(asked.directory, step + 1), context, state.tensors)
        result = take()
        trace.step(step, result.loss, context.order.samples_before(step + 1), result.learning_rate)
        return result
    return _AROUND[asked.observe](asked, context, step, groups, take) if asked.observe else take()


def end(context: TrainingContext) -> NoReturn:
    """End this worker after the replayed step, with none of the script's code that would run at its end."""
    context.world.gather(None, "leaving")  # no worker exits while another needs it to end the step
    context.events.close()
    for stream in sys.stdout, sys.stderr:
        stream.flush()
    os._exit(0)


def _sample_losses(context: TrainingContext, step: int, group: MicrobatchGroup) -> list[dict[str, object]]:
    """Return the loss of each sample of a microbatch.

    With ``loss=`` the samples have the outputs that the step computes, otherwise each is computed alone.
    """
    (microbatch,) = group.microbatches
    numbers, compute = context.order.microbatches_of(step)[microbatch], context.compute
    loss, losses = loss_given(compute.forward), list[float]()
    with without_trace(context):
        compute.buffers.reset()
        seed_all(compute.seed(STEP, step, microbatch))
        if loss is not None:
            features, target = pair_of(group.data)
            with compute.precision():
                output = compute.model(features)
                for at in range(len(numbers)):
                    total, count = sum_and_count(loss(rows(output, at, at + 1), rows(target, at, at + 1)), 1)
                    losses.append(float(total) / float(count) if count else math.nan)
        else:
            for at in range(len(numbers)):
                total, count, *_ = compute.loss_only(single(group, at)).tolist()
                losses.append(total / count if count else math.nan)
    return [
        {"sample": number, "microbatch": microbatch, "loss": one} for number, one in zip(numbers, losses, strict=True)
    ]


def _profile(
    asked: env.Replay, context: TrainingContext, step: int, _: list[MicrobatchGroup], take: Callable[[], StepResult]
) -> StepResult:
    return profiled(context, step, asked.directory / f"profile-step-{step}-rank-{context.world.rank}.json", take)


def profiled(context: TrainingContext, step: int, path: Path, take: Callable[[], StepResult]) -> StepResult:
    """Take a step under torch's profiler, and write its profile. A profile that cannot be written is a warning."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_initialized()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as found:
        result = take()
        if on_gpu:
            torch.cuda.synchronize()
    try:
        path.parent.mkdir(exist_ok=True)
        found.export_chrome_trace(str(without_link(path)))
    except (OSError, RuntimeError) as error:
        warn(context, f"The profile of step {step} cannot be written to {path}: {error}.")
        return result
    order = f"self_{'cuda' if on_gpu else 'cpu'}_time_total"
    table = found.key_averages().table(sort_by=order, row_limit=_ROWS, max_name_column_width=40)
    context.events.mark("profile", step=step, path=str(path), text=table, clock=time.time())
    return result


def _debug(
    _: env.Replay, context: TrainingContext, step: int, groups: list[MicrobatchGroup], take: Callable[[], StepResult]
) -> StepResult:
    """Stop in the debugger before the step, with the model and its microbatches at hand, and where the step fails."""
    model = context.compute.model  # noqa: F841 - for the user
    sys.stderr.write(f"step {step}: `model` and `groups` are at hand; `c` takes the step.\n")
    pdb.set_trace()
    try:
        return take()
    except Exception as error:
        pdb.post_mortem(error.__traceback__)
        raise


_OF_MICROBATCHES = {"anomaly": find_anomaly, "samples": _sample_losses}
_AROUND = {"profile": _profile, "pdb": _debug}
