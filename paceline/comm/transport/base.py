"""What a transport is: what it can do, and the sends and receives that it takes.

Who uses one asks what it can do, not where tensors are; which one fits a device is decided in ``choice``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch


class Capabilities(NamedTuple):
    """What a transport can do.

    Attributes:
        device: where its tensors are.
        on_host: they are in the memory of the host: it knows what they hold, and workers there can share them.
        same_host: the workers of a machine can exchange its tensors through shared memory.
        point_to_point: one worker can send to another while the others do something else.
        collectives: the back end adds up tensors by itself.
        ordered: what is given to a communicator runs in that order, and tags mean nothing: a receive holds up all that
            was given after it. Who sends both ways at once needs a communicator for each.
        blocking_wait: a wait blocks the host until tensors are there, and raises if they cannot come. Else it only
            orders what the device does next: before the host believes what came, it synchronizes.
    """

    device: torch.device
    on_host: bool
    same_host: bool
    point_to_point: bool
    collectives: bool
    ordered: bool
    blocking_wait: bool


class Message:
    """A tensor to send to, or receive from, one peer under a tag."""

    __slots__ = ("peer", "tag", "tensor")

    def __init__(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self.tensor = tensor
        self.peer = peer
        self.tag = tag


class Communicator(NamedTuple):
    """One of two workers, for one direction: a way for tensors that nothing else holds up.

    Attributes:
        number: tells it from others between the same workers.
        sender: the rank that sends.
        receiver: the rank that receives.
    """

    number: int
    sender: int
    receiver: int


class Work(Protocol):
    """What was started, as ``torch.distributed.Work``."""

    def wait(self) -> object:
        """Wait until it is done; see :attr:`Capabilities.blocking_wait`."""
        ...


Started: TypeAlias = "list[tuple[Work, list[int]]]"
"""Each work with the ranks that it is about."""


class TransportError(RuntimeError):
    """The back end refused to start a transfer.

    Args:
        peers: the ranks that it was about.
        reason: what the back end says.
    """

    def __init__(self, peers: Sequence[int], reason: RuntimeError) -> None:
        super().__init__(str(reason))
        self.peers = [*peers]


class Transport(Protocol):
    """Moves tensors between the workers of torch's default process group, once that is there.

    Attributes:
        capabilities: what it can do.
        backend: of the process group, for ``init_process_group``.
    """

    capabilities: Capabilities
    backend: str

    def open(self) -> None:
        """The process group has been made; all workers call this together.

        Raises:
            RuntimeError: it broke on the way.
        """
        ...

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        """Open those that are needed and not open yet; all their workers call this together, in one order."""
        ...

    def start(self, sends: Sequence[Message], receives: Sequence[Message], over: Communicator | None = None) -> Started:
        """Start to send and receive: first the receives of the result, then the sends, or one work for all.

        Args:
            sends: what to send.
            receives: what to receive; between two workers in the order in which it is sent.
            over: the communicator to use; none: that of all workers, to which they give what they have in one order.

        Raises:
            TransportError: a peer cannot be reached.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Start to add up a tensor over all workers in place."""
        ...

    def synchronize(self, look: Callable[[float], None]) -> None:
        """Wait on the host until the device has done what it was given, so that what has come can be read.

        Args:
            look: called meanwhile with the seconds waited; may raise.
        """
        ...

    def abort(self) -> None:
        """End what waits for others, from any thread; what has not come then is garbage."""
        ...
