"""Tied weights in PipeDream: parameters that several stages use while the pipeline runs without draining.

The first stage that uses a parameter owns it. At each update the other users send it the sum of their gradients, and
the owner adds them to its own for the update of the same number. The new weights come back late, by as many updates as
the owner lags behind a user, so that no stage waits::

    owner, lag 4     U1 ──┐     U2 ──┐     U3
    user, lag 0   U1   U2   └ U3 = 1   └ U4 = 2       an update after every 2 microbatches: two updates late
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from paceline.comm.links import channel, variable_length
from paceline.comm.links.channel import TAGS, Receiver, Sender
from paceline.comm.links.variable_length import VariableLengthReceiver, VariableLengthSender
from paceline.errors import ConfigError
from paceline.schedule.pipeline.pipedream import AsyncPipeline
from paceline.step.context import TrainingContext
from paceline.step.gradients.accumulate import Values
from paceline.strategies.pipeline.tied import TiedWeights

_TAGS = 1 << 25


class TiedPipeDream:
    """Tied weights of the stage of one worker.

    Raises:
        ConfigError: a stage that uses a tied parameter is replicated.
    """

    def __init__(self, context: TrainingContext, stage: int, tied: TiedWeights, stream: AsyncPipeline) -> None:
        self._stage = stage
        self._world = context.world
        self._parameters = context.update.parameters
        self._late: dict[str, int] = {}
        self._gradient_receivers: dict[str, list[VariableLengthReceiver]] = {}
        self._gradient_senders: dict[str, VariableLengthSender] = {}
        self._weight_receivers: dict[str, Receiver] = {}
        self._weight_senders: dict[str, list[Sender]] = {}
        self._updates = 0
        for number, (name, users) in enumerate(tied.users.items()):
            if replicated := [user for user in users if stream.replicas[user] > 1]:
                raise ConfigError(
                    f"The parameter {name!r} is used by stages {', '.join(map(str, users))}, of which stage "
                    f"{replicated[0]} has {stream.replicas[replicated[0]]} workers: schedule {stream.name!r} does not "
                    f"support that. Give these stages one worker each, or use a synchronous schedule such as '1f1b'."
                )
            self._connect(context, name, number, users, stream)

    def _connect(
        self, context: TrainingContext, name: str, number: int, users: Sequence[int], stream: AsyncPipeline
    ) -> None:
        world, owner = context.world, users[0]
        for user in users[1:]:
            tag = _TAGS + 3 * (number * stream.stages + user) * TAGS
            gradient, weight = f"the gradient of {name!r}", f"the weights {name!r}"
            one, other = stream.worker(user, 0), stream.worker(owner, 0)
            there = variable_length.communicator_of(tag + TAGS, one, other)
            world.open_communicators([there, channel.communicator_of(tag, other, one)])
            if self._stage == owner:
                rank = stream.worker(user, 0)
                self._gradient_receivers.setdefault(name, []).append(
                    VariableLengthReceiver(world, rank, tag + TAGS, gradient)
                )
                self._weight_senders.setdefault(name, []).append(Sender(world, rank, tag, weight))
            elif self._stage == user:
                rank = stream.worker(owner, 0)
                self._gradient_senders[name] = VariableLengthSender(world, rank, tag + TAGS, gradient)
                self._weight_receivers[name] = Receiver(world, rank, tag, weight)
                self._late[name] = -(-(stream.lag(owner) - stream.lag(user)) // stream.every)

    def is_owned_elsewhere(self, name: str) -> bool:
        """Return whether another stage owns a parameter."""
        return name in self._gradient_senders

    def exchange_gradients(self, names: Sequence[str], sums: Values) -> Values:
        """Send gradients of parameters that other stages own, and add received gradients to those of this stage."""
        self._updates += 1
        totals: Values = []
        for name, value in zip(names, sums, strict=True):
            total = value
            if name in self._gradient_senders:
                self._gradient_senders[name].send([] if value is None else [value])
            for receiver in reversed(self._gradient_receivers.get(name, [])):
                for other in receiver.take():
                    total = other if total is None else total + other
            totals.append(total)
        return totals

    def send_weights(self) -> None:
        """Send the weights that this stage owns to the other stages that use them, after an update."""
        for name, senders in self._weight_senders.items():
            weights = self._parameters[name].detach().clone()  # the next update changes them in place
            for sender in senders:
                sender.send(0, [weights])

    def receive_weights(self, version: int) -> None:
        """Receive the weights that are due by the update of this stage with this number."""
        for name in self._weight_receivers:
            if version > self._late[name]:
                self._receive(name)

    def finish(self) -> None:
        """Receive the newest weights after the pipeline has drained, and wait until everything has been sent."""
        for name in self._weight_receivers:
            for _ in range(min(self._late[name], self._updates)):
                self._receive(name)
        for sender in self._gradient_senders.values():
            sender.finish()
        for weights in itertools.chain.from_iterable(self._weight_senders.values()):
            weights.finish()
        self._updates = 0

    def _receive(self, name: str) -> None:
        receiver = self._weight_receivers[name]
        receiver.expect(0)
        (weights,) = receiver.take()
        assert weights is not None
        self._world.synchronize()
        with torch.no_grad():
            self._parameters[name].copy_(weights)
