"""Channels between the stages of a worker and the neighboring stages on other workers."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.links.channel import TAGS, Receiver, Sender, communicator_of
from paceline.comm.shm.ring import Ring
from paceline.step.context import TrainingContext

_TAGS = 1 << 24


class Links:
    """Senders and receivers by stage, neighboring stage (``peer``) and the rank that holds the neighbor."""

    def __init__(self, context: TrainingContext, workers_of: Sequence[Sequence[int]]) -> None:
        self._world = context.world
        self._exact = bool(context.settings.exact)
        self._rings = context.world.rings(2 * len(workers_of))
        neighbours = [(one, one + 1) for one in range(len(workers_of) - 1)]
        context.world.open_communicators(
            communicator_of(_tag(sender, receiver), one, other)
            for border in neighbours
            for sender, receiver in (border, border[::-1])
            for one in workers_of[sender]
            for other in workers_of[receiver]
        )
        self.reset()

    def reset(self) -> None:
        """Forget the shapes and types of tensors. Nothing may be in flight."""
        self._senders: dict[tuple[int, int, int], Sender] = {}
        self._receivers: dict[tuple[int, int, int], Receiver] = {}

    def sender(self, stage: int, peer: int, rank: int) -> Sender:
        if (stage, peer, rank) not in self._senders:
            ring = self._ring(stage, peer, self._world.rank, rank)
            sender = Sender(self._world, rank, _tag(stage, peer), _what(stage, peer), ring, self._exact)
            self._senders[stage, peer, rank] = sender
        return self._senders[stage, peer, rank]

    def receiver(self, stage: int, peer: int, rank: int) -> Receiver:
        if (stage, peer, rank) not in self._receivers:
            ring = self._ring(peer, stage, rank, self._world.rank)
            receiver = Receiver(self._world, rank, _tag(peer, stage), _what(peer, stage), ring)
            self._receivers[stage, peer, rank] = receiver
        return self._receivers[stage, peer, rank]

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for sender in self._senders.values():
            sender.finish()

    def _ring(self, sender: int, receiver: int, from_rank: int, to_rank: int) -> Ring | None:
        return None if self._rings is None else self._rings.ring(from_rank, to_rank, _number(sender, receiver))


def _tag(sender: int, receiver: int) -> int:
    return _TAGS + _number(sender, receiver) * TAGS


def _number(sender: int, receiver: int) -> int:
    """Return a number for each direction between neighboring stages."""
    return 2 * sender + (receiver > sender)


def _what(sender: int, receiver: int) -> str:
    if receiver > sender:
        return f"the output of stage {sender}"
    return f"the gradient of stage {sender} for its input"
