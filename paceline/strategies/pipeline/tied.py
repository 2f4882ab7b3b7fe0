"""Tied weights: parameters that several stages use, such as an embedding that is also the output layer.

The first stage that uses a tied parameter owns it: the owner adds up the gradients of all stages, updates the parameter
and sends the new weights to the other stages. In one process, autograd adds the gradients of a microbatch from the last
use to the first. The owner adds in the same order, for each microbatch and use with ``exact``, otherwise once per step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paceline.comm.links.variable_length import TAGS, VariableLengthReceiver, VariableLengthSender, communicator_of
from paceline.comm.transport.base import Message
from paceline.schedule.pipeline.operations import Kind, Operation, Schedule
from paceline.step.context import TrainingContext
from paceline.strategies.pipeline.tied_exact import TiedUses
from paceline.system.torch_internals import tree_leaves

_TAGS = 1 << 25


class TiedWeights:
    """Tied weights of the stages of this worker.

    Args:
        users: for each parameter name, the stages that use it, in order.
    """

    def __init__(
        self, context: TrainingContext, users: Mapping[str, Sequence[int]], workers_of: Sequence[Sequence[int]]
    ) -> None:
        self.users = users
        self._world = context.world
        self._parameters = context.update.parameters
        self._autocast = context.settings.autocast is not None
        self._workers_of = workers_of
        self._exact = context.settings.exact
        self._numbers = {name: number for number, name in enumerate(users)}
        self._forward: Operation | None = None
        self._uses: dict[tuple[str, int, int], TiedUses] = {}
        self._checked: dict[tuple[str, int], int] = {}
        """For each name and stage, the microbatch of this step whose gradient is compared with those of its uses."""
        self._received: dict[tuple[str, int, int], list[torch.Tensor]] = {}
        self._expected: dict[tuple[str, int, int], deque[int]] = defaultdict(deque)
        self._sums: dict[tuple[str, int], torch.Tensor | None] = defaultdict(lambda: None)
        self._senders: dict[tuple[str, int, int], VariableLengthSender] = {}
        self._receivers: dict[tuple[str, int, int], VariableLengthReceiver] = {}
        self._world.open_communicators(
            communicator_of(self._tag(name, stage), rank, owner)
            for name, (first, *others) in users.items()
            for stage in others
            for rank in workers_of[stage]
            for owner in workers_of[first]
        )

    def owner_of(self, name: str) -> int | None:
        """Return the stage that owns a parameter, or None if only one stage uses it."""
        return self.users[name][0] if name in self.users else None

    def wrap(self, stage: int, forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the forward pass of a stage. With ``exact`` it records the uses of tied weights."""
        names = [name for name, users in self.users.items() if stage in users and name in self._parameters]
        return partial(self._record_uses, names, forward) if self._exact and names else forward

    @contextmanager
    def during(self, operation: Operation) -> Iterator[None]:
        """Return a context for an operation. Uses are recorded in forward passes, but not during recomputation."""
        self._forward = operation if operation.kind is Kind.FORWARD else None
        try:
            yield
        finally:
            self._forward = None

    def _record_uses(self, names: Sequence[str], forward: Callable[[Any], Any], values: Any) -> Any:
        outputs = forward(values)
        if self._forward is None:
            return outputs
        stage, microbatch = self._forward.stage, self._forward.microbatch
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        for name in names:
            parameter = self._parameters[name]
            if not parameter.requires_grad:
                continue
            checked = self._checked.setdefault((name, stage), microbatch)
            is_last = stage == self.users[name][-1]
            if is_last and microbatch != checked:
                continue
            uses = self._uses[name, stage, microbatch] = TiedUses(name, stage, parameter, leaves)
            if not is_last:
                uses.check_separable(self._autocast)
        return outputs

    def _use_gradients(self, name: str, stage: int, microbatch: int, sum_: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the gradients of the uses in a stage, last use first, or only their sum for the last stage."""
        uses = self._uses.pop((name, stage, microbatch), None)
        if uses is not None and microbatch == self._checked[name, stage]:
            uses.check_complete(sum_)
        found = [] if uses is None or stage == self.users[name][-1] else uses.gradients()
        return found if len(found) > 1 else _as_list(sum_)

    def send_gradient(
        self, name: str, stage: int, microbatch: int, gradient: torch.Tensor | None, schedule: Schedule
    ) -> None:
        """Send the gradient of a microbatch to the owner. Without ``exact``, accumulate until the end of the step."""
        if not self._exact:
            before = self._sums[name, stage]
            self._sums[name, stage] = gradient if before is None else _sum(before, gradient)
            return
        rank = schedule.worker_of(self.users[name][0], microbatch)
        gradients = self._use_gradients(name, stage, microbatch, gradient)
        if rank == self._world.rank:
            self._received[name, stage, microbatch] = gradients
        else:
            self._sender(name, stage, rank).send(gradients)

    def add_gradients(
        self, name: str, microbatch: int, own: torch.Tensor | None, schedule: Schedule
    ) -> torch.Tensor | None:
        """Return a microbatch's gradient, with ``exact`` summed over all stages; ``own`` is the owner's gradient."""
        if not self._exact:
            return own
        gradient: torch.Tensor | None = None
        for stage in reversed(self.users[name][1:]):
            rank = schedule.worker_of(stage, microbatch)
            if rank != self._world.rank:
                self._receive_until(name, stage, rank, microbatch, schedule)
            for one in self._received.pop((name, stage, microbatch)):
                gradient = _sum(gradient, one)
        for one in self._use_gradients(name, self.users[name][0], microbatch, own):
            gradient = _sum(gradient, one)
        return gradient

    def _receive_until(self, name: str, stage: int, rank: int, microbatch: int, schedule: Schedule) -> None:
        """Receive the gradients of a worker in the order of sending, up to a microbatch, and keep the earlier ones."""
        if not (expected := self._expected[name, stage, rank]):
            owner = self.users[name][0]
            expected.extend(
                one.microbatch
                for one in schedule.workers[rank]
                if one.stage == stage
                and one.kind in (Kind.BACKWARD, Kind.WEIGHT)
                and schedule.worker_of(owner, one.microbatch) == self._world.rank
            )
        while (name, stage, microbatch) not in self._received:
            self._received[name, stage, expected.popleft()] = self._receive(name, stage, rank)

    def finish_step(self, schedule: Schedule) -> dict[str, torch.Tensor | None]:
        """Return other stages' gradient sums for owned parameters, after all backward passes. Empty with ``exact``."""
        sums: dict[str, torch.Tensor | None] = {}
        for name, (first, *others) in self.users.items() if not self._exact else ():
            for stage in others:
                for rank, owner in self._pairs(stage, first):
                    if not schedule.workers[rank]:  # a short batch has no microbatch for this rank
                        continue
                    if rank == self._world.rank == owner:
                        sums[name] = _sum(self._sums.pop((name, stage), None), sums.get(name))
                    elif rank == self._world.rank:
                        self._sender(name, stage, owner).send(_as_list(self._sums.pop((name, stage), None)))
                    elif owner == self._world.rank:
                        for gradient in self._receive(name, stage, rank):
                            sums[name] = _sum(gradient, sums.get(name))
        self._checked.clear()
        for sender in self._senders.values():
            sender.finish()
        return sums

    def send_weights(self) -> None:
        """Send the new weights from the owners to the other stages after an update."""
        transfers = []
        for name, (first, *others) in self.users.items():
            tag, value = _TAGS - 1 - self._numbers[name], self._parameters[name].detach()
            for rank, owner in {pair for stage in others for pair in self._pairs(stage, first)}:
                if rank == owner or rank in self._workers_of[first]:
                    continue
                if owner == self._world.rank:
                    transfers += self._world.start_transfers([Message(value, rank, tag)], [], f"while it sent {name!r}")
                elif rank == self._world.rank:
                    transfers += self._world.start_transfers(
                        [], [Message(value, owner, tag)], f"while it sent {name!r}"
                    )
        for transfer in transfers:
            transfer.wait()

    def _pairs(self, stage: int, first: int) -> list[tuple[int, int]]:
        """Return each worker of a stage with the worker of the owning stage that it exchanges with."""
        owners = self._workers_of[first]
        return [(rank, owners[index % len(owners)]) for index, rank in enumerate(self._workers_of[stage])]

    def _sender(self, name: str, stage: int, rank: int) -> VariableLengthSender:
        key = name, stage, rank
        if key not in self._senders:
            what = f"the gradient of {name!r}"
            self._senders[key] = VariableLengthSender(self._world, rank, self._tag(name, stage), what)
        return self._senders[key]

    def _receive(self, name: str, stage: int, rank: int) -> list[torch.Tensor]:
        key = name, stage, rank
        if key not in self._receivers:
            what = f"the gradient of {name!r}"
            self._receivers[key] = VariableLengthReceiver(self._world, rank, self._tag(name, stage), what)
        return self._receivers[key].take()

    def _tag(self, name: str, stage: int) -> int:
        return _TAGS + (self._numbers[name] * len(self._workers_of) + stage) * TAGS


def _sum(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        return left if right is None else right
    return left + right


def _as_list(gradient: torch.Tensor | None) -> list[torch.Tensor]:
    return [] if gradient is None else [gradient]
