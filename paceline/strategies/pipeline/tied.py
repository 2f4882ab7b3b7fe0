"""Parameters that several stages use, such as an embedding that is the output layer as well.

The first stage that uses one owns it: it adds up the gradients of all, makes the update, and gives the new weights to
the others. In one process the gradients of a microbatch meet from the last use to the first; so they do here,
microbatch by microbatch and use by use if the bits matter, else once in a step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.comm.links.variable_length import TAGS, VariableLengthReceiver, VariableLengthSender
from paceline.comm.world import Message
from paceline.schedule.operations import Kind, Operation, Schedule
from paceline.step.job import Job
from paceline.strategies.pipeline.tied_exact import TiedUses

_TAGS = 1 << 25


class TiedWeights:
    """The parameters that several stages use, as one worker sees them.

    Args:
        job: what is trained.
        users: for each name the stages that use it, in order.
        workers_of: for each stage the ranks that hold it.
    """

    def __init__(self, job: Job, users: Mapping[str, Sequence[int]], workers_of: Sequence[Sequence[int]]) -> None:
        self._job = job
        self._users = users
        self._workers_of = workers_of
        self._each = job.settings.exact
        self._numbers = {name: number for number, name in enumerate(users)}
        self._forward: Operation | None = None
        self._uses: dict[tuple[str, int, int], TiedUses] = {}
        self._looked: dict[tuple[str, int], int] = {}
        """For each name and stage the microbatch of this step whose gradient is compared with those of its uses."""
        self._here: dict[tuple[str, int, int], list[torch.Tensor]] = {}
        self._coming: dict[tuple[str, int, int], deque[int]] = defaultdict(deque)
        self._sums: dict[tuple[str, int], torch.Tensor | None] = defaultdict(lambda: None)
        self._outlets: dict[tuple[str, int, int], VariableLengthSender] = {}
        self._inlets: dict[tuple[str, int, int], VariableLengthReceiver] = {}

    @property
    def users(self) -> Mapping[str, Sequence[int]]:
        """For each name the stages that use it, in order."""
        return self._users

    def owner_of(self, name: str) -> int | None:
        """The stage that owns a parameter; none if only one stage uses it."""
        return self._users[name][0] if name in self._users else None

    def watched(self, stage: int, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The forward pass of a stage; with exact bits the uses of what a later stage uses as well are kept apart."""
        names = [name for name, used in self._users.items() if stage in used and name in self._job.update.parameters]
        return partial(self._watch, names, call) if self._each and names else call

    @contextmanager
    def during(self, operation: Operation) -> Iterator[None]:
        """While an operation is carried out."""
        self._forward = operation if operation.kind is Kind.FORWARD else None
        try:
            yield
        finally:
            self._forward = None

    def _watch(self, names: Sequence[str], call: Callable[[Any], Any], values: Any) -> Any:
        outputs = call(values)
        if self._forward is None:  # it is computed again, and nothing of that goes back
            return outputs
        stage, microbatch = self._forward.stage, self._forward.microbatch
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        for name in names:
            if not self._job.update.parameters[name].requires_grad:
                continue
            looked = self._looked.setdefault((name, stage), microbatch)
            is_last = stage == self._users[name][-1]
            if is_last and microbatch != looked:
                continue
            uses = self._uses[name, stage, microbatch] = TiedUses(
                name, stage, self._job.update.parameters[name], leaves
            )
            if not is_last:
                uses.check_apart(self._job.settings.autocast is not None)
        return outputs

    def _apart(self, name: str, stage: int, microbatch: int, sum_: torch.Tensor | None) -> list[torch.Tensor]:
        """The gradients of the uses in a stage, from the last to the first, or their sum if nothing comes before it.

        Raises:
            InputError: for the first microbatch of a step: these are not all that there is to the sum.
        """
        uses = self._uses.pop((name, stage, microbatch), None)
        if uses is not None and microbatch == self._looked[name, stage]:
            uses.check_all_found(sum_)
        found = [] if uses is None or stage == self._users[name][-1] else uses.gradients()
        return found if len(found) > 1 else _given(sum_)

    def give(self, name: str, stage: int, microbatch: int, gradient: torch.Tensor | None, schedule: Schedule) -> None:
        """The gradient from a stage that does not own the parameter."""
        if not self._each:
            before = self._sums[name, stage]
            self._sums[name, stage] = gradient if before is None else _sum(before, gradient)
            return
        rank = schedule.worker_of(self._users[name][0], microbatch)
        gradients = self._apart(name, stage, microbatch, gradient)
        if rank == self._job.world.rank:
            self._here[name, stage, microbatch] = gradients
        else:
            self._outlet(name, stage, rank).send(gradients)

    def complete(self, name: str, microbatch: int, own: torch.Tensor | None, schedule: Schedule) -> torch.Tensor | None:
        """The gradient of a microbatch from all stages; ``own`` is that of the stage that owns the parameter."""
        if not self._each:
            return own
        gradient: torch.Tensor | None = None
        for stage in reversed(self._users[name][1:]):
            rank = schedule.worker_of(stage, microbatch)
            if rank != self._job.world.rank:
                self._take_until(name, stage, rank, microbatch, schedule)
            for one in self._here.pop((name, stage, microbatch)):
                gradient = _sum(gradient, one)
        for one in self._apart(name, self._users[name][0], microbatch, own):
            gradient = _sum(gradient, one)
        return gradient

    def _take_until(self, name: str, stage: int, rank: int, microbatch: int, schedule: Schedule) -> None:
        """Take gradients in the order in which a worker gives them, up to that of a microbatch; keep the others."""
        coming = self._coming[name, stage, rank]
        if not coming:
            owner = self._users[name][0]
            coming.extend(
                one.microbatch
                for one in schedule.workers[rank]
                if one.stage == stage
                and one.kind in (Kind.BACKWARD, Kind.WEIGHT)
                and schedule.worker_of(owner, one.microbatch) == self._job.world.rank
            )
        while (name, stage, microbatch) not in self._here:
            self._here[name, stage, coming.popleft()] = self._take(name, stage, rank)

    def bring_together(self, schedule: Schedule) -> dict[str, torch.Tensor | None]:
        """At the end of a step without exact bits: the sums of the other stages, for the parameters owned here."""
        sums: dict[str, torch.Tensor | None] = {}
        if self._each:
            return sums
        for name, (first, *others) in self._users.items():
            for stage in others:
                for rank, owner in self._pairs(stage, first):
                    if not schedule.workers[rank]:  # a short batch has left nothing for it
                        continue
                    if rank == self._job.world.rank == owner:
                        sums[name] = _sum(self._sums.pop((name, stage), None), sums.get(name))
                    elif rank == self._job.world.rank:
                        self._outlet(name, stage, owner).send(_given(self._sums.pop((name, stage), None)))
                    elif owner == self._job.world.rank:
                        for gradient in self._take(name, stage, rank):
                            sums[name] = _sum(gradient, sums.get(name))
        self.finish()
        return sums

    def spread(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """After an update: the owners give the new weights to the others."""
        transfers = []
        for name, (first, *others) in self._users.items():
            tag, value = _TAGS - 1 - self._numbers[name], parameters[name].detach()
            for rank, owner in {pair for stage in others for pair in self._pairs(stage, first)}:
                if rank == owner or rank in self._workers_of[first]:
                    continue
                if owner == self._job.world.rank:
                    transfers += self._job.world.post([Message(value, rank, tag)], [], f"while it sent {name!r}")
                elif rank == self._job.world.rank:
                    transfers += self._job.world.post([], [Message(value, owner, tag)], f"while it sent {name!r}")
        for transfer in transfers:
            transfer.wait()

    def finish(self) -> None:
        """The step has ended: wait until all has been sent."""
        self._looked.clear()
        for outlet in self._outlets.values():
            outlet.finish()

    def _pairs(self, stage: int, first: int) -> list[tuple[int, int]]:
        """Each worker of a stage, and the owner it has to do with."""
        owners = self._workers_of[first]
        return [(rank, owners[place % len(owners)]) for place, rank in enumerate(self._workers_of[stage])]

    def _outlet(self, name: str, stage: int, rank: int) -> VariableLengthSender:
        key = name, stage, rank
        if key not in self._outlets:
            what = f"the gradient of {name!r}"
            self._outlets[key] = VariableLengthSender(self._job.world, rank, self._tag(name, stage), what)
        return self._outlets[key]

    def _take(self, name: str, stage: int, rank: int) -> list[torch.Tensor]:
        key = name, stage, rank
        if key not in self._inlets:
            what = f"the gradient of {name!r}"
            self._inlets[key] = VariableLengthReceiver(self._job.world, rank, self._tag(name, stage), what)
        return self._inlets[key].take()

    def _tag(self, name: str, stage: int) -> int:
        return _TAGS + (self._numbers[name] * len(self._workers_of) + stage) * TAGS


def _sum(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        return left if right is None else right
    return left + right


def _given(gradient: torch.Tensor | None) -> list[torch.Tensor]:
    return [] if gradient is None else [gradient]
