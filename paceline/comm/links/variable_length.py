"""Lists of tensors of one type and shape, from one worker to another: their number goes first, each time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.links import channel
from paceline.comm.links.channel import Receiver, Sender
from paceline.comm.transport.base import Communicator
from paceline.comm.world import World

TAGS = 2 * channel.TAGS
"""Of each pair of a sender and a receiver."""


def communicator_of(tag: int, sender: int, receiver: int) -> Communicator:
    """The communicator of a pair, by its first tag; only its lists need one."""
    return channel.communicator_of(tag + channel.TAGS, sender, receiver)


class VariableLengthSender:
    """Sends lists of any length to one worker.

    Args:
        world: the workers.
        peer: the rank that receives.
        tag: the first tag to use.
        what: is sent, for an error.
    """

    def __init__(self, world: World, peer: int, tag: int, what: str) -> None:
        self._counts = Sender(world, peer, tag, what, host=range(1))
        self._values = Sender(world, peer, tag + channel.TAGS, what)

    def send(self, values: Sequence[torch.Tensor]) -> None:
        """Start to send; the tensors must not change until :meth:`finish`.

        Raises:
            WorkerLost: the receiver is gone.
        """
        self._counts.send(0, [torch.tensor(len(values))])
        if values:
            whole = values[0].unsqueeze(0) if len(values) == 1 else torch.stack([*values])
            self._values.send(len(values), [whole])

    def finish(self) -> None:
        """Wait until all has been sent.

        Raises:
            WorkerLost: the receiver is gone.
        """
        self._counts.finish()
        self._values.finish()


class VariableLengthReceiver:
    """Receives what a :class:`VariableLengthSender` sends, in the same order.

    Args:
        world: the workers.
        peer: the rank that sends.
        tag: the first tag of the sender.
        what: is received, for an error.
    """

    def __init__(self, world: World, peer: int, tag: int, what: str) -> None:
        self._counts = Receiver(world, peer, tag, what, host=range(1))
        self._values = Receiver(world, peer, tag + channel.TAGS, what)

    def take(self) -> list[torch.Tensor]:
        """Wait for the next list.

        Raises:
            WorkerLost: the sender is gone, or silent for the timeout.
        """
        count = _one(self._counts, 0)
        return [*_one(self._values, int(count)).unbind()] if count else []


def _one(receiver: Receiver, samples: int) -> torch.Tensor:
    receiver.expect(samples)
    (value,) = receiver.take()
    assert value is not None
    return value
