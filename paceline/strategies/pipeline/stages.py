"""Stages of a cut model, and the stages that this worker holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.comm.collectives.subgroup import Subgroup
from paceline.comm.values import sendable
from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import preserve_generators
from paceline.errors import ConfigError, InputError
from paceline.partition.base import Layers, Stage
from paceline.partition.cut import bounds_of, layers_of
from paceline.partition.flags import requires_grad_flags, training_flags
from paceline.partition.model_checks import check_gradients, check_loss
from paceline.partition.profile import measure_layers
from paceline.schedule.balance import Cluster, LayerCost, balance, check_memory
from paceline.schedule.pipeline.operations import Kind, Schedule
from paceline.schedule.tree import Node, nodes_of
from paceline.step.context import TrainingContext
from paceline.step.divided.consolidate import consolidate_state_dict
from paceline.step.probes.kept import check_kept
from paceline.step.probes.loss_reduction import check_loss_reduction
from paceline.step.probes.repeatability import check_repeatable
from paceline.strategies.pipeline.release import Released
from paceline.strategies.pipeline.tied import TiedWeights

_log = logging.getLogger("paceline")
_REPEATS = 3  # number of measurements of each layer for an automatic cut


@dataclass(frozen=True)
class LocalStage:
    """Stage that this worker holds."""

    forward: Callable[[Any], Any]
    recompute: bool  # whether its activations are computed again in the backward pass
    trained: Sequence[str]  # names of the parameters that it trains
    buffers: frozenset[str]
    kept: Sequence[str]  # names of values that the forward pass of the model keeps, which the loss must not read


@sendable
@dataclass(frozen=True)
class Partition:
    """Cut of a model into stages."""

    bounds: Sequence[tuple[int, int]]  # first layer and end of each stage
    # measured seconds of each layer, forward and backward. None if not measured.
    times: Sequence[tuple[float, float]] | None = None
    fixed: bool = True  # whether the settings forbid another cut
    kept: Sequence[str] = ()  # names of values that the forward pass of the model keeps, which the loss must not read
    recompute: bool = False  # whether stages compute their activations again in the backward pass


class Stages:
    """Stages of a model, with the stages that this worker holds.

    Args:
        context: training context, with its current process group.
        schedule: any of the schedules to run. It defines which workers hold which stage.
        partition: cut of the model. Defaults to the cut that the settings ask for.

    Attributes:
        replicas: workers that hold the same stages.
        outside: names of the parameters and buffers that no layer uses.
        training_flags: ``training`` flags of the modules.
        requires_grad_flags: ``requires_grad`` flags of the parameters that the optimizer was given.
        tied: parameters that several stages use.
        updated: for each local stage, the names of the parameters that it updates, in the order of the model.
    """

    def __init__(self, context: TrainingContext, schedule: Schedule, partition: Partition | None = None) -> None:
        self._context = context
        self.count = schedule.stages
        world, model = context.world, context.compute.model
        self.training_flags = training_flags(model)
        self.requires_grad_flags = requires_grad_flags(context.update.parameters.values())
        self.workers_of = [schedule.workers_of(stage) for stage in range(schedule.stages)]
        with preserve_generators(), context.loop.noting_forward():
            (group,) = context.feed.load(0, [range(1)])
            self._layers = layers = layers_of(model, context.compute.input_of(group))
            self._prepare_all_modes()
        self.partition = partition or self._agree_on_partition(layers, group)
        stages = [layers.stage(begin, end) for begin, end in self.partition.bounds]
        self.outside = self._names_outside(stages)
        if context.compute.batch_loss is not None:  # may use what no layer uses, so the last stage trains it
            stages[-1].parameters += [name for name in context.update.parameters if name in self.outside]
        self._buffers = [stage.buffers for stage in stages]
        self._check_buffers()
        if world.rank == 0:
            self._record([layers.names[begin:end] for begin, end in self.partition.bounds], again=partition is not None)
        users: dict[str, list[int]] = {}
        for number, stage in enumerate(stages):
            for name in stage.parameters:
                users.setdefault(name, []).append(number)
        self.tied = TiedWeights(context, {name: used for name, used in users.items() if len(used) > 1}, self.workers_of)
        trained = context.update.parameters
        own = schedule.stages_of(world.rank)
        self.local = {
            number: LocalStage(
                self.tied.wrap(number, stages[number]),
                self.partition.recompute,
                [name for name in trained if name in stages[number].parameters],
                frozenset(stages[number].buffers),
                self.partition.kept,
            )
            for number in own
        }
        self.updated = {
            number: [name for name in stage.trained if self.tied.owner_of(name) in (None, number)]
            for number, stage in self.local.items()
        }
        self.replicas = Subgroup(world, self.workers_of[own[0]])
        self._split_state(stages, users, own)
        if context.compute.buffers.fixed:
            self._restrict_buffers()

    def _names_outside(self, stages: list[Stage]) -> frozenset[str]:
        """Return the names of the parameters and buffers that no layer uses."""
        model = self._context.compute.model
        every = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
        return frozenset(every.difference(*(stage.parameters for stage in stages), *(one.buffers for one in stages)))

    def _split_state(self, stages: list[Stage], users: dict[str, list[int]], own: Sequence[int]) -> None:
        """Find the parameters and buffers whose newest values this worker has, and the parameters to release."""
        model = self._context.compute.model
        unused = self.outside - users.keys()  # all workers have these
        owned = {name for name, used in users.items() if used[0] in own}
        owned |= {name for number in own for name in stages[number].buffers}
        self._owned = frozenset(owned | unused)
        self._is_whole = True
        used = unused.union(*(stages[number].parameters for number in own))
        self._released = Released(model, self._context.update.optimizer, used, unused.union(*self.updated.values()))

    def _prepare_all_modes(self) -> None:
        """Prepare for the modes of all workers, because a worker that joins starts in the script's first mode."""
        for mode in self._context.world.gather(self.training_flags.current(), "start"):
            with self.training_flags.set_to(mode):
                self._layers.prepare()

    def _record(self, stages: list[Sequence[str]], again: bool) -> None:
        """Record the stages; ``again`` marks another cut of a model that was cut before."""
        context, times = self._context, None
        if self.partition.times is not None:
            parts = [self.partition.times[begin:end] for begin, end in self.partition.bounds]
            times = [[sum(forward for forward, _ in part), sum(backward for _, backward in part)] for part in parts]
        context.events.mark("cut", stages=stages, times=times, again=again, recompute=self.partition.recompute)
        if self.partition.recompute and not context.settings.pipeline.recompute and not again:
            text = "memory: the stages fit if they recompute their activations, so they do"
            context.events.mark("note", text=text)
            _log.info(text)

    def _agree_on_partition(self, layers: Layers, group: MicrobatchGroup) -> Partition:
        """Return rank 0's choice of the cut, because the workers measure different times."""
        chosen: Partition | tuple[str, str] | None = None
        if self._context.world.rank == 0:
            try:
                chosen = self._choose_partition(layers, group)
            except (ConfigError, InputError) as error:
                chosen = type(error).__name__, str(error)
        compute, values = self._context.compute, self._context.loop.forward_values
        known = chosen, compute.metrics, list(values.left)
        chosen, compute.metrics, left = self._context.world.gather(known, "start")[0]
        values.load(left)
        if isinstance(chosen, tuple):
            raise {"ConfigError": ConfigError, "InputError": InputError}[chosen[0]](chosen[1])
        assert chosen is not None
        return chosen

    def _choose_partition(self, layers: Layers, group: MicrobatchGroup) -> Partition:
        compute, settings = self._context.compute, self._context.settings.pipeline
        gigabytes = self._context.settings.memory_gigabytes
        with self._context.loop.noting_forward():
            check_loss(compute, group)
        check_loss_reduction(self._context, [group], 0)
        kept = check_kept(self._context, group, 0)
        try:
            check_gradients(compute, layers, group, self._context.settings.exact, self._context.settings.seed)
        except InputError:
            check_repeatable(self._context, group, 0)  # a loss that is not repeatable differs without a cut, too
            raise
        if settings.cut is not None and gigabytes is None:
            return Partition(bounds_of(layers, self.count, settings.cut), kept=kept, recompute=settings.recompute)
        memory_bytes = gigabytes and gigabytes * 1e9
        cluster = Cluster(
            memory_bytes=memory_bytes, microbatches=self._context.order.microbatches, recompute=settings.recompute
        )
        costs = measure_layers(compute, layers, group, _REPEATS)
        try:
            bounds = self._bounds(layers, costs, cluster)
        except ConfigError:
            if self._context.settings.recompute != "auto" or cluster.recompute:
                raise
            cluster = replace(cluster, recompute=True)
            bounds = self._bounds(layers, costs, cluster)
        times = [(cost.forward, cost.backward) for cost in costs]
        fixed = settings.cut is not None or memory_bytes is not None
        return Partition(bounds, times, fixed, kept, cluster.recompute)

    def _bounds(self, layers: Layers, costs: Sequence[LayerCost], cluster: Cluster) -> Sequence[tuple[int, int]]:
        """Return the configured or the best cut. Raise ConfigError if it does not fit into memory."""
        if (cut := self._context.settings.pipeline.cut) is None:
            return balance(costs, self.count, cluster).bounds
        bounds = bounds_of(layers, self.count, cut)
        check_memory(costs, bounds, cluster)
        return bounds

    def _check_buffers(self) -> None:
        """Raise if a cut separates two uses of a changing buffer, because neither stage would see all changes."""
        changing = set(self._context.compute.buffers.agreed)
        for stage, names in enumerate(self._buffers):
            for other in range(stage):
                if both := sorted(changing & set(names) & set(self._buffers[other])):
                    raise InputError(
                        f"Stages {other} and {stage} both change the buffer {both[0]!r}: keep the module that it "
                        f"belongs to in one stage (pipeline.cut), or use one module for each place."
                    )

    def agree_on_buffers(self, changing: Sequence[str]) -> None:
        """Agree on the buffers that change on any worker. Each worker calls this with the buffers that change on it."""
        gathered = self._context.world.gather(changing, "step")
        self._context.compute.buffers.fix({name for names in gathered for name in names})
        self._check_buffers()
        self._restrict_buffers()

    def _restrict_buffers(self) -> None:
        self._context.compute.buffers.restrict({name for stage in self.local.values() for name in stage.buffers})

    def nodes(self, schedule: Schedule) -> list[list[Node]]:
        """Return, for each replica, the tree nodes whose sums it has. Without ``exact`` there is at most one."""
        first = min(self.local)
        nodes = []
        for place, rank in enumerate(self.replicas.ranks):
            mine = [one.microbatch for one in schedule.workers[rank] if one.kind is Kind.FORWARD and one.stage == first]
            nodes.append(nodes_of(mine) if self._context.settings.exact else [Node(0, place)] if mine else [])
        return nodes

    def groups(self, schedule: Schedule) -> list[range]:
        """Return the microbatches whose data this worker needs, for the model's input or for the loss."""
        wanted = {0, self.count - 1}
        mine = {one.microbatch for one in schedule.workers[self._context.world.rank] if one.stage in wanted}
        return [range(microbatch, microbatch + 1) for microbatch in sorted(mine) if microbatch >= 0]

    def prepare(self) -> None:
        """Prepare for the model's current mode, if it is new. All workers call this together.

        Raises:
            InputError: the script has changed the layers of the model.
        """
        self._layers.check()
        if not self._layers.is_ready:
            self.synchronize()
            self._layers.prepare()

    def mark_updated(self) -> None:
        """Note at an update that the workers' states differ from now on, and release other stages' parameters."""
        self._is_whole = False
        self._released.release()

    @property
    def owned(self) -> frozenset[str] | None:
        """Names of the parameters and buffers whose newest values this worker has. None if it has all of them."""
        return None if self._is_whole else self._owned

    def synchronize(self) -> None:
        """Give all workers the whole state. All workers call this together."""
        if not self._is_whole:
            self._released.allocate()
            consolidate_state_dict(self._context, self._context.world.gather(self._owned, "synchronizing"))
            self._is_whole = True

    def close(self) -> None:
        """Allocate all parameters again. Their values are undefined until state is loaded into them."""
        self._released.allocate()
