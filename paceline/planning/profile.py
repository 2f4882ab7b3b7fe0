"""Measurement of a model on its first microbatch, and of the links between workers."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from paceline.comm.links.channel import Receiver, Sender, communicator_of
from paceline.comm.transport.base import Message
from paceline.comm.world import World
from paceline.data.feed import MicrobatchGroup
from paceline.data.order import UNKNOWN
from paceline.errors import InputError
from paceline.partition.base import Layers, Stage
from paceline.partition.cut import layers_of
from paceline.partition.model_checks import check_loss
from paceline.partition.profile import measure, measure_layers, seconds_now
from paceline.planning.blocks import blocks_of
from paceline.planning.budget import may_fuse, measure_segments, sizes_of
from paceline.planning.costs import Profile
from paceline.schedule.balance import LayerCost
from paceline.schedule.pipeline.choice import synchronous_schedule
from paceline.schedule.pipeline.operations import Kind
from paceline.settings import PipelineSettings
from paceline.step.checks import sparse_parameters
from paceline.step.context import TrainingContext
from paceline.step.forward import ForwardRunner
from paceline.step.gradients.accumulate import Values, add
from paceline.step.optimizers.several import parts_of
from paceline.step.probes.optimizer_probe import step_of
from paceline.strategies.pipeline.executor import Executor
from paceline.strategies.pipeline.stages import Stages
from paceline.strategies.pipeline.synchronous import StepGradients
from paceline.system.process_memory import keep_freed_pages, process_memory

_log = logging.getLogger("paceline")
_LINK_BYTES = 8 << 20
_REPEATS = 5
_STAGES = 2
_MICROBATCHES = 4
_MESSAGES = 20
_PAUSE_SECONDS = 0.005
"""Time between two messages, because a message takes longer after something else than after another message."""
_TAG = 1 << 23


def profile(context: TrainingContext) -> Profile:
    """Measure the layers of a model, and the links of all workers. All workers call this together.

    All workers compute at the same time, so the times include the mutual slowdown of a machine's workers. The optimizer
    makes updates, so the model must not be used afterwards.

    A model that cannot be cut is measured as one layer.
    """
    order, model = context.order, context.compute.model
    if sparse := sparse_parameters(model, "modules"):
        raise InputError(
            f"{min(sparse)!r} has sparse gradients, which are not simulated: use torch.nn.Embedding with "
            f"sparse=False for the plan."
        )
    memory, uncut = _memory_before(context), _uncut(context)
    keep_freed_pages(large=True)  # as training does after its first steps
    costs = _whole_cost if uncut else _layer_costs
    begin, used = time.perf_counter(), time.process_time()
    passes = {count: costs(context, count) for count in _counts(context)}
    load = (time.process_time() - used) / (time.perf_counter() - begin)
    context.world.gather(None, "profile")
    sizes = sizes_of(context, measure_segments(context, blocks_of(model), 0))
    link = _link(context.world)
    message = None if link is None else _message_seconds(context.world)
    whole, half = (0.0, 0.0) if uncut or context.world.size > 1 else _pass_seconds(context, passes[1])
    return Profile(
        model=type(model).__name__,
        samples=len(order.parts_of(0)[0]),
        microbatches=order.microbatches,
        link_bytes_per_second=link,
        passes=passes,
        core_load=load,
        update_seconds=_update_seconds(context),
        add_seconds=_add_seconds(context),
        batch=order.batch,
        steps_per_epoch=None if order.first_of(1) == UNKNOWN else order.first_of(1),
        exact=bool(context.settings.exact),
        sizes=sizes,
        uncut=uncut,
        autocast=context.settings.autocast is not None,
        shard_copy=context.settings.shard_copy,
        shard_within=context.settings.shard_within,
        message_seconds=message,
        pass_seconds=whole,
        half_pass_seconds=half,
        process_bytes=memory,
    )


def _memory_before(context: TrainingContext) -> int:
    """Return the bytes of this process besides the weights. On a GPU they do not count."""
    memory = process_memory()
    if memory is None or context.world.device.type != "cpu":
        return 0
    model = context.compute.model
    return max(0, memory.held - sum(one.nbytes for one in (*model.parameters(), *model.buffers())))


def _counts(context: TrainingContext) -> list[int]:
    """Return the numbers of microbatches of the passes to measure: powers of two if microbatches may be fused."""
    most = context.order.microbatches if may_fuse(context) else 1
    return [1 << power for power in range(most.bit_length())]


def _uncut(context: TrainingContext) -> str:
    """Return why the model cannot be cut into layers, or an empty string."""
    (group,) = context.feed.load(0, [range(1)])
    try:
        check_loss(context.compute, group)
        layers_of(context.compute.model, context.compute.input_of(group))
    except InputError as error:
        return str(error)
    return ""


def _layer_costs(context: TrainingContext, count: int) -> tuple[LayerCost, ...]:
    (group,) = context.feed.load(0, [range(count)])
    layers = layers_of(context.compute.model, context.compute.input_of(group))
    return tuple(measure_layers(context.compute, layers, group))


def _whole_cost(context: TrainingContext, count: int) -> tuple[LayerCost, ...]:
    (group,) = context.feed.load(0, [range(count)])
    layer = _Whole(context.compute, group)
    with context.loop.noting_forward():
        return tuple(measure(context.compute.model, layer, group.data, lambda loss: loss))


def _pass_seconds(context: TrainingContext, layers: Sequence[LayerCost]) -> tuple[float, float]:
    """Return the seconds that a stage takes for a pass besides its layers, and for each half of a backward pass.

    This worker holds both stages of a pipeline for some microbatches. Without measurement, passes are those of layers.
    """
    if len(layers) < _STAGES or context.compute.batch_loss is not None:
        return 0.0, 0.0
    try:
        return _beyond_layers(context, layers)
    except Exception as error:  # noqa: BLE001 - other strategies can still be planned
        _log.warning(
            "no pipeline could be measured, so they are planned without the overhead of a pass: %s: %s",
            type(error).__name__,
            error,
        )
        return 0.0, 0.0


def _beyond_layers(context: TrainingContext, layers: Sequence[LayerCost]) -> tuple[float, float]:
    pipeline = PipelineSettings(schedule="interleaved", chunks=_STAGES, cut=(layers[len(layers) // _STAGES].name,))
    context = replace(context, settings=context.settings.model_copy(update={"pipeline": pipeline}))
    schedule = synchronous_schedule(pipeline, 1, context.order.microbatches)
    stages = Stages(context, schedule)
    executor = Executor(context, stages.local, stages.workers_of)
    count = min(_MICROBATCHES, context.order.microbatches)
    passes = [one for one in schedule.workers[0] if 0 <= one.microbatch < count]
    split = [
        one._replace(kind=kind)
        for one in passes
        for kind in ((Kind.INPUT, Kind.WEIGHT) if one.kind is Kind.BACKWARD else (one.kind,))
    ]

    seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for operations in (passes, split) * _REPEATS:
        groups = context.feed.load(0, [range(number, number + 1) for number in range(count)])
        context.compute.buffers.begin()
        executor.reset()
        executor.add(0, groups, schedule.worker_of, audits=False)
        gradients = StepGradients(context, stages, schedule)
        for one in operations:
            took = seconds_of(partial(executor.run, [one], gradients))
            seconds[one.kind, one.stage].append(took)
    medians = {kind: sum(median(seconds[kind, stage]) for stage in range(_STAGES)) for kind, _ in seconds}
    forward, backward = (sum(getattr(one, name) for one in layers) for name in ("forward", "backward"))
    whole = (medians[Kind.FORWARD] + medians[Kind.BACKWARD] - forward - backward) / 2
    halves = (medians[Kind.INPUT] + medians[Kind.WEIGHT] - backward) / 2
    return max(0.0, whole / _STAGES), max(0.0, halves / _STAGES)


class _Whole(Layers, Stage):
    """Forward pass of a microbatch group as one layer. It returns the loss."""

    def __init__(self, compute: ForwardRunner, group: MicrobatchGroup) -> None:
        self.names = [type(compute.model).__name__]
        self.parameters = [name for name, _ in compute.model.named_parameters()]
        self.buffers = [name for name, _ in compute.model.named_buffers()]
        self._compute, self._group = compute, group

    def stage(self, begin: int, end: int) -> Stage:
        return self

    def __call__(self, values: Any) -> torch.Tensor:
        return self._compute.loss_of(self._group)[0]


def _update_seconds(context: TrainingContext) -> float:
    """Return the seconds of an update of all parameters. The first update, which creates the state, does not count."""
    parameters = context.update.parameters.values()
    for value in parameters:
        value.grad = torch.zeros_like(value)
    parts = parts_of(context.update.optimizer)
    seconds = [sum(seconds_of(partial(step_of(part), part)) for part in parts) for _ in range(_REPEATS + 1)]
    return median(seconds[1:])


def _add_seconds(context: TrainingContext) -> float:
    """Return the seconds to add a gradient for each parameter to a sum. All lie in memory, and in no cache."""
    sums: Values = [torch.zeros_like(value) for value in context.update.parameters.values()]
    gradients: Values = [torch.zeros_like(value) for value in context.update.parameters.values()]
    return median(seconds_of(partial(add, sums, gradients)) for _ in range(_REPEATS))


def seconds_of(act: Callable[[], object]) -> float:
    """Return the seconds that a call takes, with the operations of the GPU that it starts."""
    begin = seconds_now()
    act()
    return seconds_now() - begin


def _link(world: World) -> float | None:
    """Return the bytes per second in each direction over the slowest link between neighbors, or None without links."""
    found = []
    world.await_process_group()
    for first in range(world.size - 1):
        if world.rank in (first, first + 1):
            found.append(_speed(world, 2 * first + 1 - world.rank))
        world.gather(None, "profile")
    speeds = [speed for measured in world.gather(found, "profile") for speed in measured]
    return min(speeds, default=None)


def _message_seconds(world: World) -> float:
    """Return the seconds for which a worker is busy with a small message, on average of sending and receiving."""
    found: list[float] = []
    world.open_communicators(communicator_of(_TAG, *pair) for pair in ((0, 1), (1, 0)))
    if world.rank < _STAGES:
        value, peer, what = torch.zeros(1, device=world.device), 1 - world.rank, "a message of the profile"
        sender, receiver = Sender(world, peer, _TAG, what), Receiver(world, peer, _TAG, what)
    for _ in range(_MESSAGES):
        if world.rank < _STAGES:
            time.sleep(_PAUSE_SECONDS)
            begin = seconds_now()
            receiver.expect(1)
            sender.send(1, [value])
            found.append(seconds_now() - begin)
        world.gather(None, "profile")  # now the message has arrived
        if world.rank < _STAGES:
            time.sleep(_PAUSE_SECONDS)
            begin = seconds_now()
            receiver.take()
            found[-1] += seconds_now() - begin
            sender.finish()
    middles = [median(each) for each in world.gather(found, "profile") if each]
    return float(max(middles)) / 2


def _speed(world: World, peer: int) -> float:
    """Return the bytes per second in each direction, with both in use at once as in a pipeline."""
    own, others = (torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=world.device) for _ in range(2))
    seconds = []
    for tag in range(_REPEATS + 1):
        begin = time.perf_counter()
        for transfer in world.start_transfers([Message(own, peer, tag)], [Message(others, peer, tag)]):
            transfer.wait()
        world.synchronize()
        seconds.append(time.perf_counter() - begin)
    return _LINK_BYTES / median(seconds[1:])
