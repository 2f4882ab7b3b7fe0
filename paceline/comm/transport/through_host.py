"""Transport of device tensors through pinned host memory and gloo: slow, but correct where NCCL cannot be used.

NCCL refuses two workers on one GPU. This transport moves each tensor in four steps::

    sender's device ─ pinned memory ─ gloo ─ pinned memory ─ receiver's device

A wait blocks the host and raises if a peer is lost, as with gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from paceline.comm.transport.base import Communicator, Message, Started, Work
from paceline.comm.transport.gloo import Gloo
from paceline.comm.transport.host_copy import HostCopy


class ThroughHost:
    """Default process group for tensors on a device. gloo moves copies of the tensors."""

    backend = "gloo"

    def __init__(self, device: torch.device) -> None:
        self._gloo = Gloo(same_host=False)
        self.capabilities = self._gloo.capabilities._replace(device=device, on_host=False)

    def open(self) -> None:
        self._gloo.open()

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        """Do nothing, because each tag has its own order."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message], over: Communicator | None = None) -> Started:
        """See :class:`Transport`. The host waits until the tensors to send have been copied."""
        copies = [HostCopy(one.tensor) for one in sends]
        rooms = [_room_for(one.tensor) for one in receives]
        started = self._gloo.start(
            [Message(copy.wait(), one.peer, one.tag) for copy, one in zip(copies, sends, strict=True)],
            [Message(room, one.peer, one.tag) for room, one in zip(rooms, receives, strict=True)],
        )
        arrivals = [
            (_Arrival(work, room, one.tensor), peers)
            for (work, peers), room, one in zip(started, rooms, receives, strict=False)
        ]
        return [*arrivals, *started[len(receives) :]]

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """See :class:`Transport`. The host waits until the tensor has been copied."""
        copy = HostCopy(tensor).wait()
        return _Arrival(self._gloo.all_reduce(copy), copy, tensor)

    def synchronize(self, look: Callable[[float], None]) -> None:
        """Do nothing, because waits block the host."""

    def abort(self) -> None:
        self._gloo.abort()


class _Arrival:
    """Receive into host memory. :meth:`wait` copies the received tensor to the device."""

    def __init__(self, work: Work, room: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._room, self._target = work, room, target

    def wait(self) -> None:
        self._work.wait()
        self._target.detach().copy_(self._room)


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
