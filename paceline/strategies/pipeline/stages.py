"""A model that is cut into stages, and the ones that this worker holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from paceline.comm.subgroup import Subgroup
from paceline.data.feed import Piece
from paceline.data.keys import preserve_generators
from paceline.errors import ConfigError, InputError, PacelineError
from paceline.partition.base import Layers
from paceline.partition.cut import bounds_of, layers_of
from paceline.partition.flags import requires_grad_flags, training_flags
from paceline.partition.loss_check import check_loss
from paceline.partition.profile import measure
from paceline.schedule.balance import Cluster, LayerCost, balance, check_memory
from paceline.schedule.operations import Schedule
from paceline.step.forward import pair_of, sum_and_count
from paceline.step.gather_state import bring_together
from paceline.step.job import Job
from paceline.strategies.pipeline.executor import Executor, Held, Hooks
from paceline.strategies.pipeline.release import Released
from paceline.strategies.pipeline.tied import TiedWeights


@dataclass(frozen=True)
class Borders:
    """Where a model is cut.

    Attributes:
        bounds: the first layer of each stage, and the one after its last.
        times: seconds that each layer was measured to take, forward and backward; none if it was not measured.
        stays: no other cut may take its place.
    """

    bounds: Sequence[tuple[int, int]]
    times: Sequence[tuple[float, float]] | None = None
    stays: bool = True


_REPEATS = 3
"""How often each layer is measured for a cut that nobody gives."""


class Stages:
    """The stages of a model as one worker sees them.

    Args:
        job: what is trained; its workers have met.
        schedule: one of those that will be carried out: it says who holds which stage.
        cut: where to cut the model; none: as the settings say.

    Attributes:
        cut: where it is cut, and why there.
        held: the stages of this worker.
        team: the workers that hold the same stages.
        training_flags: ``training`` of the modules.
        requires_grad_flags: of the parameters that the optimizer was given.
        tied: the parameters that several stages use.
        names: for each stage held the trained parameters whose update is made here, in the order of the model.
    """

    def __init__(self, job: Job, schedule: Schedule, cut: Borders | None = None) -> None:
        self._job = job
        self.stages = schedule.stages
        world, model = job.world, job.compute.model
        self.training_flags = training_flags(model)
        self.requires_grad_flags = requires_grad_flags(job.update.parameters.values())
        self.workers_of = [schedule.workers_of(stage) for stage in range(schedule.stages)]
        with preserve_generators():
            (piece,) = job.feed.load(0, [range(1)])
            self._layers = layers = layers_of(model, pair_of(piece.data)[0])
            self._prepare_all()
        self.cut = cut or self._agree(layers, piece)
        stages = [layers.stage(begin, end) for begin, end in self.cut.bounds]
        self._buffers = [stage.buffers for stage in stages]
        self.check_buffers()
        if world.rank == 0:
            self._record([layers.names[begin:end] for begin, end in self.cut.bounds], again=cut is not None)
        users: dict[str, list[int]] = {}
        for number, stage in enumerate(stages):
            for name in stage.parameters:
                users.setdefault(name, []).append(number)
        self.tied = TiedWeights(job, {name: used for name, used in users.items() if len(used) > 1}, self.workers_of)
        trained = job.update.parameters
        own = schedule.stages_of(world.rank)
        self.held = {
            number: Held(
                self.tied.watched(number, stages[number]),
                [name for name in trained if name in stages[number].parameters],
                frozenset(stages[number].buffers),
            )
            for number in own
        }
        self.names = {
            number: [name for name in held.trained if self.tied.owner_of(name) in (None, number)]
            for number, held in self.held.items()
        }
        self.team = Subgroup(world, self.workers_of[own[0]])
        every = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
        idle = every - users.keys() - {name for stage in stages for name in stage.buffers}  # all have these
        mine = {name for name, used in users.items() if used[0] in own}
        mine |= {name for number in own for name in stages[number].buffers}
        self._holds = frozenset(mine | idle)
        self._whole = True
        used = idle.union(*(stages[number].parameters for number in own))
        updated = idle.union(*self.names.values())
        self._elsewhere = Released(model, job.update.optimizer, used, updated)
        if job.compute.buffers.settled:
            job.compute.buffers.restrict({name for held in self.held.values() for name in held.buffers})

    def _prepare_all(self) -> None:
        """Get to know the model in the modes of all workers: those of one that joins are those of the start."""
        for mode in self._job.world.gather(self.training_flags.current(), "start"):
            with self.training_flags.set_to(mode):
                self._layers.prepare()

    def _record(self, stages: list[Sequence[str]], again: bool) -> None:
        """All that a reader of the events must know to predict a step; ``again``: in the middle of a loop."""
        job, times = self._job, None
        if self.cut.times is not None:
            parts = [self.cut.times[begin:end] for begin, end in self.cut.bounds]
            times = [[sum(forward for forward, _ in part), sum(backward for _, backward in part)] for part in parts]
        job.events.mark(
            "cut",
            stages=stages,
            times=times,
            again=again,
            device=job.world.device.type,
            workers=job.world.size,
            microbatches=job.order.microbatches,
            pipeline=job.settings.pipeline.model_dump(mode="json"),
        )

    def _agree(self, layers: Layers, piece: Piece) -> Borders:
        """Where the first worker cuts the model, as no two measure the same."""
        told: Borders | PacelineError | None = None
        if self._job.world.rank == 0:
            try:
                told = self._decide(layers, piece)
            except (ConfigError, InputError) as error:
                told = error
        told = self._job.world.gather(told, "start")[0]
        if isinstance(told, PacelineError):
            raise told
        assert told is not None
        return told

    def _decide(self, layers: Layers, piece: Piece) -> Borders:
        check_loss(self._job.compute, piece)
        settings = self._job.settings.pipeline
        if settings.cut is not None and settings.memory_gigabytes is None:
            return Borders(bounds_of(layers, self.stages, settings.cut))
        bytes_each = settings.memory_gigabytes and settings.memory_gigabytes * 1e9
        cluster = Cluster(memory_bytes=bytes_each, microbatches=self._job.order.microbatches)
        costs = self._costs(layers, piece)
        times = [(cost.forward, cost.backward) for cost in costs]
        if settings.cut is None:
            return Borders(balance(costs, self.stages, cluster).bounds, times, stays=bytes_each is not None)
        bounds = bounds_of(layers, self.stages, settings.cut)
        check_memory(costs, bounds, cluster)
        return Borders(bounds, times)

    def _costs(self, layers: Layers, piece: Piece) -> list[LayerCost]:
        compute = self._job.compute

        def loss(output: Any) -> torch.Tensor:
            def model(features: Any) -> Any:
                return output

            return sum_and_count(compute.forward(cast(nn.Module, model), piece.data), piece.samples)[0]

        return measure(compute.model, layers, pair_of(piece.data)[0], loss, _REPEATS, compute.precision)

    def check_buffers(self) -> None:
        """Refuse a cut between two uses of a buffer that changes: nobody would have all its changes.

        Raises:
            InputError: names the stages and the buffer; of what all workers agree on, so on all of them.
        """
        live = set(self._job.compute.buffers.agreed)
        for place, names in enumerate(self._buffers):
            for other in range(place):
                both = sorted(live & set(names) & set(self._buffers[other]))
                if both:
                    raise InputError(
                        f"Stages {other} and {place} both change the buffer {both[0]!r}: leave the module that it "
                        f"belongs to in one stage (pipeline.cut), or use one module for each place."
                    )

    def executor(self, hooks: Hooks) -> Executor:
        """What carries out operations of these stages; see :class:`Executor`."""
        return Executor(self._job, self.held, self.stages - 1, hooks)

    def loaded(self, schedule: Schedule) -> list[range]:
        """The microbatches of which this worker needs the data: for the model's input, or for the loss."""
        wanted = {0, self.stages - 1}
        mine = {one.microbatch for one in schedule.workers[self._job.world.rank] if one.stage in wanted}
        return [range(microbatch, microbatch + 1) for microbatch in sorted(mine) if microbatch >= 0]

    @property
    def is_ready(self) -> bool:
        """Whether the stages can run the model as it is now; see :class:`Layers`."""
        return self._layers.is_ready

    def prepare(self) -> None:
        """Get to know the model as it is now; all call this together."""
        self.settle()
        self._layers.prepare()

    def moved(self) -> None:
        """An update was made: the workers' states differ from now on."""
        self._whole = False
        self._elsewhere.release()

    @property
    def holds(self) -> frozenset[str] | None:
        """The parameters and buffers of which this worker has the newest values; none: it has all."""
        return None if self._whole else self._holds

    def settle(self) -> None:
        """Bring all workers to the same state; all call this together."""
        if not self._whole:
            self._elsewhere.make_room()
            bring_together(self._job, self._job.world.gather(self._holds, "settling"))
            self._whole = True

    def close(self) -> None:
        """The model is whole again in shape: what comes next fills in the values."""
        self._elsewhere.make_room()
