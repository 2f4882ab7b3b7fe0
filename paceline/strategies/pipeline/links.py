"""The channels between the stages that a worker holds and their neighbours on other workers."""

from __future__ import annotations

from paceline.comm.links.channel import TAGS, Receiver, Sender
from paceline.comm.shm.ring import Ring
from paceline.step.job import Job

_TAGS = 1 << 24


class Links:
    """From stage to stage, of one worker.

    Args:
        job: what is trained.
        last: the number of the last stage.
    """

    def __init__(self, job: Job, last: int) -> None:
        self._world = job.world
        self._exact = job.settings.exact
        self._rings = job.world.rings(2 * (last + 1))
        self.forget()

    def forget(self) -> None:
        """Nothing is under way; what comes may have other forms than before."""
        self._outlets: dict[tuple[int, int, int], Sender] = {}
        self._inlets: dict[tuple[int, int, int], Receiver] = {}

    def outlet(self, stage: int, peer: int, rank: int) -> Sender:
        """From a stage of this worker to a neighbour of it, on a worker of a rank."""
        if (stage, peer, rank) not in self._outlets:
            lane = self._lane(stage, peer, self._world.rank, rank)
            outlet = Sender(self._world, rank, _tag(stage, peer), _what(stage, peer), lane, self._exact)
            self._outlets[stage, peer, rank] = outlet
        return self._outlets[stage, peer, rank]

    def inlet(self, stage: int, peer: int, rank: int) -> Receiver:
        """To a stage of this worker from a neighbour of it, on a worker of a rank."""
        if (stage, peer, rank) not in self._inlets:
            lane = self._lane(peer, stage, rank, self._world.rank)
            inlet = Receiver(self._world, rank, _tag(peer, stage), _what(peer, stage), lane)
            self._inlets[stage, peer, rank] = inlet
        return self._inlets[stage, peer, rank]

    def finish(self) -> None:
        """Wait until all has been sent."""
        for outlet in self._outlets.values():
            outlet.finish()

    def _lane(self, sender: int, receiver: int, worker: int, other: int) -> Ring | None:
        """From a stage on a worker to a stage on another."""
        return None if self._rings is None else self._rings.ring(worker, other, _way(sender, receiver))


def _tag(sender: int, receiver: int) -> int:
    return _TAGS + _way(sender, receiver) * TAGS


def _way(sender: int, receiver: int) -> int:
    """A number for each way between neighbouring stages."""
    return 2 * sender + (receiver > sender)


def _what(sender: int, receiver: int) -> str:
    if receiver > sender:
        return f"the output of stage {sender}"
    return f"the gradient of stage {sender} for its input"
