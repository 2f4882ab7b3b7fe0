"""gloo transport: tagged transfers of tensors in host memory. A wait blocks, and raises if a peer is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from paceline.comm.transport.base import Capabilities, Communicator, Message, Started, TransportError, Work
from paceline.comm.transport.gloo_waits import CollectiveWork, MessageWork, Waits


class Gloo:
    """Default process group for tensors on the CPU.

    Args:
        same_host: whether the workers of a machine can share memory.
    """

    backend = "gloo"

    def __init__(self, same_host: bool) -> None:
        self.capabilities = Capabilities(
            device=torch.device("cpu"),
            on_host=True,
            same_host=same_host,
            point_to_point=True,
            collectives=True,
            ordered=False,
            blocking_wait=True,
        )
        self._waits = Waits()

    def open(self) -> None:
        """Allow waits again after :meth:`abort`. gloo connects by itself."""
        self._waits.reset()

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        """Do nothing, because each tag has its own order."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message], over: Communicator | None = None) -> Started:
        started = [(self._begin(dist.irecv, message), [message.peer]) for message in receives]
        return started + [(self._begin(dist.isend, message), [message.peer]) for message in sends]

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return CollectiveWork(self._waits, dist.all_reduce(tensor, async_op=True))

    def synchronize(self, look: Callable[[float], None]) -> None:
        """Do nothing, because waits block the host."""

    def abort(self) -> None:
        """End all waits, because gloo does not end all of them when their connections are shut down."""
        self._waits.interrupt()

    def _begin(self, call: Callable[..., Work | None], message: Message) -> Work:
        """Start one send or receive, so that an error names its peer."""
        try:
            work = call(message.tensor, message.peer, tag=message.tag)
        except RuntimeError as error:
            raise TransportError([message.peer], error) from error
        assert work is not None
        return MessageWork(self._waits, work)
