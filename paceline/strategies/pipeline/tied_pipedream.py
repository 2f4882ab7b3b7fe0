"""Parameters that several stages use, in a pipeline that never runs empty.

The first stage that uses one owns it. At each of their updates the others give it the sum of their gradients, and the
owner adds them to its own for the update of the same number. The weights after an update come back to the others as
late as the owner is behind them, so that nobody waits::

    owner, lag 4          U1 ──┐     U2 ──┐     U3
    borrower, lag 0  U1   U2   └ U3 = 1   └ U4 = 2       an update after every 2 microbatches: two updates late
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from paceline.comm.links.channel import TAGS, Receiver, Sender
from paceline.comm.links.variable_length import VariableLengthReceiver, VariableLengthSender
from paceline.errors import ConfigError
from paceline.schedule.pipedream import AsyncPipeline
from paceline.step.accumulate import Values
from paceline.step.job import Job
from paceline.strategies.pipeline.tied import TiedWeights

_TAGS = 1 << 25


class TiedPipeDream:
    """What one worker lends and borrows.

    Args:
        job: what is trained.
        stage: of this worker.
        tied: the parameters that several stages use.
        stream: the pipeline.

    Raises:
        ConfigError: a stage that uses one of them is held by several workers.
    """

    def __init__(self, job: Job, stage: int, tied: TiedWeights, stream: AsyncPipeline) -> None:
        self._stage = stage
        self._late: dict[str, int] = {}
        self._gradients_in: dict[str, list[VariableLengthReceiver]] = {}
        self._gradients_out: dict[str, VariableLengthSender] = {}
        self._weights_in: dict[str, Receiver] = {}
        self._weights_out: dict[str, list[Sender]] = {}
        self._taken = 0
        self._updates = 0
        for number, (name, users) in enumerate(tied.users.items()):
            replicated = [user for user in users if stream.replicas[user] > 1]
            if replicated:
                raise ConfigError(
                    f"The parameter {name!r} is used by stages {', '.join(map(str, users))}, of which stage "
                    f"{replicated[0]} has {stream.replicas[replicated[0]]} workers: schedule {stream.name!r} cannot do "
                    f"that. Give these stages one worker each, or use a synchronous schedule such as '1f1b'."
                )
            self._connect(job, name, number, users, stream)

    def _connect(self, job: Job, name: str, number: int, users: Sequence[int], stream: AsyncPipeline) -> None:
        world, owner = job.world, users[0]
        for user in users[1:]:
            tag = _TAGS + 3 * (number * stream.stages + user) * TAGS
            gradient, weight = f"the gradient of {name!r}", f"the weights {name!r}"
            if self._stage == owner:
                rank = stream.worker(user, 0)
                self._gradients_in.setdefault(name, []).append(
                    VariableLengthReceiver(world, rank, tag + TAGS, gradient)
                )
                self._weights_out.setdefault(name, []).append(Sender(world, rank, tag, weight))
            elif self._stage == user:
                rank = stream.worker(owner, 0)
                self._gradients_out[name] = VariableLengthSender(world, rank, tag + TAGS, gradient)
                self._weights_in[name] = Receiver(world, rank, tag, weight)
                self._late[name] = -(-(stream.lag(owner) - stream.lag(user)) // stream.every)

    def is_borrowed(self, name: str) -> bool:
        """Whether another stage owns a parameter."""
        return name in self._gradients_out

    def exchange(self, names: Sequence[str], sums: Values) -> Values:
        """Give the sums of gradients of what is borrowed; add to those of what is owned what the others give."""
        self._updates += 1
        whole: Values = []
        for name, value in zip(names, sums, strict=True):
            total = value
            if name in self._gradients_out:
                self._gradients_out[name].send([] if value is None else [value])
            for inlet in reversed(self._gradients_in.get(name, [])):
                for other in inlet.take():
                    total = other if total is None else total + other
            whole.append(total)
        return whole

    def give_back(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Send the weights after an update to those that have borrowed them."""
        for name, outlets in self._weights_out.items():
            weights = parameters[name].detach().clone()  # the next update changes them in place
            for outlet in outlets:
                outlet.send(0, [weights])

    def take_back(self, version: int, parameters: Mapping[str, nn.Parameter]) -> None:
        """At this stage's update of a number: the weights that come back in time for it."""
        for name in self._weights_in:
            if version > self._late[name]:
                self._take(name, parameters)

    def finish(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """The pipeline has run empty: get the newest weights."""
        for name in self._weights_in:
            for _ in range(min(self._late[name], self._updates)):
                self._take(name, parameters)
        for gradients in self._gradients_out.values():
            gradients.finish()
        for weights in itertools.chain.from_iterable(self._weights_out.values()):
            weights.finish()
        self._updates = 0

    def _take(self, name: str, parameters: Mapping[str, nn.Parameter]) -> None:
        self._weights_in[name].expect(0)
        (weights,) = self._weights_in[name].take()
        assert weights is not None
        with torch.no_grad():
            parameters[name].copy_(weights)
