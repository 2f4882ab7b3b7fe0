"""Channels for lists of any length, whose tensors share one type and shape. The length of each list is sent first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.links import channel
from paceline.comm.links.channel import Receiver, Sender
from paceline.comm.transport.base import Communicator
from paceline.comm.world import World

TAGS = 2 * channel.TAGS  # number of tags per pair of sender and receiver


def communicator_of(tag: int, sender: int, receiver: int) -> Communicator:
    """Return the communicator of a pair, given its first tag. Only the tensors need a communicator."""
    return channel.communicator_of(tag + channel.TAGS, sender, receiver)


class VariableLengthSender:
    """Sender of lists of any length to one worker."""

    def __init__(self, world: World, peer: int, tag: int, what: str) -> None:
        self._counts = Sender(world, peer, tag, what)
        self._values = Sender(world, peer, tag + channel.TAGS, what)

    def send(self, values: Sequence[torch.Tensor]) -> None:
        """Start sending a list. The tensors must not change until :meth:`finish`."""
        self._counts.send(0, [torch.tensor(len(values))], host=range(1))
        if values:
            whole = values[0].unsqueeze(0) if len(values) == 1 else torch.stack([*values])
            self._values.send(len(values), [whole])

    def finish(self) -> None:
        """Wait until all lists have been sent. Raises WorkerLost if the receiver was lost."""
        self._counts.finish()
        self._values.finish()


class VariableLengthReceiver:
    """Receiver of the lists of a :class:`VariableLengthSender`, in the same order."""

    def __init__(self, world: World, peer: int, tag: int, what: str) -> None:
        self._counts = Receiver(world, peer, tag, what)
        self._values = Receiver(world, peer, tag + channel.TAGS, what)

    def take(self) -> list[torch.Tensor]:
        """Wait for the next list and return it."""
        count = _one(self._counts, 0)
        return [*_one(self._values, int(count)).unbind()] if count else []


def _one(receiver: Receiver, samples: int) -> torch.Tensor:
    receiver.expect(samples)
    (value,) = receiver.take()
    assert value is not None
    return value
