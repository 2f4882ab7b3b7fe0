"""A model that is cut into stages, and the ones that this worker holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.comm.team import Team
from paceline.data.keys import kept_states
from paceline.errors import InputError
from paceline.schedule.operations import Schedule
from paceline.strategies.base import Job
from paceline.strategies.compute import pair_of
from paceline.strategies.executor import Executor, Held, Hooks
from paceline.strategies.layers import bounds_of, layers_of
from paceline.strategies.scattered import bring_together
from paceline.strategies.stage import Layers
from paceline.strategies.tied import Tied


class Staged:
    """The stages of a model as one worker sees them.

    Args:
        job: what is trained; its workers have met.
        schedule: one of those that will be carried out: it says who holds which stage.

    Attributes:
        held: the stages of this worker.
        team: the workers that hold the same stages.
        tied: the parameters that several stages use.
        names: for each stage held the trained parameters whose update is made here, in the order of the model.
    """

    def __init__(self, job: Job, schedule: Schedule) -> None:
        self._job = job
        self.stages = schedule.stages
        world, model = job.world, job.compute.model
        self.workers_of = [schedule.workers_of(stage) for stage in range(schedule.stages)]
        with kept_states():
            (piece,) = job.feed.load(0, [range(1)])
            layers = layers_of(model, pair_of(piece.data)[0])
        self.bounds = self._bounds(layers)
        stages = [layers.stage(begin, end) for begin, end in self.bounds]
        self._check_buffers([stage.buffers for stage in stages])
        users: dict[str, list[int]] = {}
        for number, stage in enumerate(stages):
            for name in stage.parameters:
                users.setdefault(name, []).append(number)
        self.tied = Tied(job, {name: used for name, used in users.items() if len(used) > 1}, self.workers_of)
        trained = job.update.parameters
        own = schedule.stages_of(world.rank)
        self.held = {
            number: Held(
                stages[number],
                [name for name in trained if name in stages[number].parameters],
                frozenset(stages[number].buffers),
            )
            for number in own
        }
        self.names = {
            number: [name for name in held.trained if self.tied.owner_of(name) in (None, number)]
            for number, held in self.held.items()
        }
        self.team = Team(world, self.workers_of[own[0]])
        first = {number for number in own if self.workers_of[number][0] == world.rank}
        self._valid = {name for name, used in users.items() if used[0] in first}
        self._valid |= {name for number in first for name in stages[number].buffers}
        unused = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
        unused -= users.keys() | {name for stage in stages for name in stage.buffers}
        if world.rank == 0:
            self._valid |= unused
        self._settled = False

    def _bounds(self, layers: Layers) -> list[tuple[int, int]]:
        job, stages = self._job, self.stages
        given = job.settings.pipeline.cut
        cut = list(given or ())
        if given is None:
            cut = [layers.names[len(layers.names) * stage // stages] for stage in range(1, stages)]
        told: list[Any] = job.world.gather(bounds_of(layers, stages, cut), "start")
        bounds: list[tuple[int, int]] = told[0]
        if job.world.rank == 0:
            parts = [[begin, end, layers.names[begin]] for begin, end in bounds]
            job.events.mark("cut", stages=parts, layers=layers.names)
        return bounds

    def _check_buffers(self, buffers: Sequence[Sequence[str]]) -> None:
        """Refuse a cut between two uses of a buffer that changes: nobody would have all its changes."""
        live = set(self._job.compute.buffers.live)
        for place, names in enumerate(buffers):
            for other in range(place):
                both = sorted(live & set(names) & set(buffers[other]))
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

    def moved(self) -> None:
        """An update was made: the workers' states differ from now on."""
        self._settled = False

    def settle(self) -> None:
        """Bring all workers to the same state; all call this together."""
        if not self._settled:
            bring_together(self._job, self._valid)
            self._settled = True
