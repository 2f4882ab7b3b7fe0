"""Recovery points: states in memory to which the workers return after a loss, if they hold replicas of the model.

::

    worker 0   replicas 0, 1   point ─ step ─ step ─ outer step ─ point    A point is the model at rest, which every
                 copy of 4, 5                                              worker has, and the replicas, each on its
    worker 1   replicas 2, 3   point ─ step ─ step ─ outer step ─ point    worker and on the next one. Another worker
                 copy of 0, 1                                              takes a lost replica over and computes its
    worker 2   replicas 4, 5   point ─ step † lost                         steps again, as the others do with theirs.
                 copy of 2, 3

A new point counts when all workers have it. Until then each worker keeps the one before, so all go back to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.checkpoint.encoding import PREFIX
from paceline.checkpoint.tensors import REPLICA
from paceline.checkpoint.training_state import SHARES, HostBuffers, TrainingState
from paceline.environments import env
from paceline.partition.flags import requires_grad_flags, training_flags
from paceline.schedule.shares import even
from paceline.step.context import TrainingContext
from paceline.step.divided.tensors import Division
from paceline.strategies import registry
from paceline.strategies.sharded.holders import copy_of, heirs_of
from paceline.system import fault_points
from paceline.training.progress import Progress
from paceline.training.recovery.activity import RE_FORMING
from paceline.training.recovery.state_transfer import StateBytes, transfer

_KEEPING = "keeping the replicas in memory"


@dataclass(frozen=True)
class Point:
    """State after some steps, in host memory."""

    steps: int
    tensors: Mapping[str, torch.Tensor]  # state that every worker has
    rest: Any  # everything but tensors (checkpoint.training_state)
    replicas: Mapping[str, torch.Tensor]  # tensors of the replicas of this worker and of the one before


class Points:
    """Newest point of this worker, and the next one while the others may lack it."""

    def __init__(self, context: TrainingContext, state: TrainingState) -> None:
        self._context, self._state = context, state
        self._newest: Point | None = None
        self._next: Point | None = None

    @property
    def wanted(self) -> bool:
        """Whether workers may be lost, leave or join while the others continue with replicas."""
        return env.survives_losses() and registry.lanes_of(self._context) > 0

    @property
    def steps(self) -> int | None:
        """Number of completed steps in the newest point. None if there is no point."""
        return None if self._newest is None else self._newest.steps

    def begin(self, steps: int) -> None:
        """Make the state that all workers have just loaded the newest point, if the workers will hold replicas."""
        world = self._context.world
        self._newest = self._next = None
        if self.wanted and (self._context.settings.keeps_errors or steps >= self._context.settings.local.after):
            replicas = self._context.replicas
            for name in [name for name in replicas if world.rank not in self._ranks(name)]:
                del replicas[name]
            self._newest = self._point(steps, dict(replicas))

    def keep(self, steps: int, replicas: Mapping[str, torch.Tensor]) -> None:
        """Make the current state the newest point. All workers call this together, with the tensors of their replicas.

        Raises:
            WorkerLost: a worker was lost. The newest point may be this one or the one before.
        """
        self._next = self._point(steps, self._spread(replicas, _KEEPING, self._ranks))
        fault_points.reach("keeping replicas")
        self._context.world.gather(steps, _KEEPING)
        self._newest, self._next = self._next, None

    def hand_on(self, leaving: Collection[int]) -> None:
        """Give the replicas that only leaving workers keep to workers that stay. All workers call this together.

        Args:
            leaving: ranks of the workers that leave, not all of them.

        Raises:
            WorkerLost: a worker was lost.
        """
        if self._newest is None:
            return
        world, kept = self._context.world, self._newest.replicas
        everyone = world.gather(sorted(_numbers(kept)), _KEEPING)
        numbers = sorted({number for numbers in everyone for number in numbers})
        holders = [[rank for rank, numbers in enumerate(everyone) if number in numbers] for number in numbers]
        heirs = heirs_of(holders, [1] * len(numbers), leaving, world.size)
        to = {numbers[place]: rank for place, rank in heirs.items()}
        given = {name: value for name, value in kept.items() if _number(name) in to}
        found = self._spread(given, _KEEPING, lambda name: (to[_number(name)],))
        world.gather(None, _KEEPING)  # those that leave know now that the others have them
        self._newest = replace(self._newest, replicas={**kept, **found})

    def go_back(self, everyone: Sequence[Progress | None]) -> int | None:
        """Load the newest point that all workers have. All workers call this together.

        Returns:
            its number of steps. None if there is no point, or if a replica is lost.

        Raises:
            WorkerLost: a worker was lost. No point has been changed.
        """
        context, rank = self._context, self._context.world.rank
        steps = max((one.point for one in everyone if one is not None and one.point is not None), default=None)
        if steps is None:
            return None
        point = next((one for one in (self._newest, self._next) if one is not None and one.steps == steps), None)
        found = self._spread({} if point is None else point.replicas, RE_FORMING, self._ranks)
        known = context.world.gather(sorted(_numbers(found)), RE_FORMING)
        if 0 < len({number for numbers in known for number in numbers}) < registry.lanes_of(context):
            return None
        if None in everyone:
            senders = [place for place, one in enumerate(everyone) if one is not None]
            own = None if point is None else StateBytes(point.tensors, point.rest, steps)
            if (received := transfer(context.world, senders, own)) is not None:
                tensors = {name: value.clone() for name, value in received.tensors.items()}
                point = Point(steps, tensors, received.rest, {})
        assert point is not None
        self._next = self._newest = Point(steps, point.tensors, point.rest, {**point.replicas, **found})
        context.world.gather(steps, RE_FORMING)
        self._newest, self._next = Point(steps, point.tensors, point.rest, found), None
        self._load(self._newest, joins=everyone[rank] is None)
        return steps

    def _load(self, point: Point, *, joins: bool) -> None:
        """Load a point. Only a worker that joins takes the modes and flags of then: the scripts have moved on."""
        model = self._context.compute.model
        with ExitStack() as kept:
            for flags in () if joins else (training_flags(model), requires_grad_flags(model.parameters())):
                kept.enter_context(flags.set_to(flags.current()))
            tensors = {**point.tensors, **point.replicas}
            inside = {name: value.clone() for name, value in tensors.items() if name.startswith(PREFIX)}
            self._state.load(tensors | inside, point.rest)  # the strategy changes its state in place

    def _point(self, steps: int, replicas: Mapping[str, torch.Tensor]) -> Point:
        """Return a point with a copy of the current state."""
        without = SHARES, *(["data"] if self._context.order.grows else [])  # joiners have got the samples
        snapshot = HostBuffers().copy(self._state.snapshot(steps, without))
        return Point(steps, snapshot.tensors, snapshot.state, replicas)

    def _spread(
        self, own: Mapping[str, torch.Tensor], what: str, to: Callable[[str], Collection[int]]
    ) -> dict[str, torch.Tensor]:
        """Send tensors of replicas to the ranks ``to(name)``, and return copies of those that this worker gets."""
        division = Division(self._context.world, own, _no_slices, what)
        tensors = division.put_together([*division.parts], to)
        return {name: value.to("cpu", copy=True) for name, value in tensors}

    def _ranks(self, name: str) -> set[int]:
        """Return the worker of a replica and the one with its copy, given the name of one of its tensors."""
        shares = even(registry.lanes_of(self._context), self._context.world.size)
        holder = next(rank for rank, share in enumerate(shares) if _number(name) in share)
        return {holder, copy_of(holder, self._context.world.hosts)}


def _number(name: str) -> int:
    """Return the number of the replica to which a tensor belongs."""
    return int(name.removeprefix(REPLICA).partition("/")[0])


def _numbers(names: Iterable[str]) -> set[int]:
    return set(map(_number, names))


def _no_slices(name: str) -> torch.Size:
    raise AssertionError(name)
