"""Interface of transports: capabilities, sends and receives.

Callers ask a transport for its capabilities, not for the location of tensors. ``choice`` selects it for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch


class Capabilities(NamedTuple):
    """Capabilities of a transport."""

    device: torch.device  # device of its tensors
    on_host: bool  # whether tensors are in host memory, where the host can read them and workers can share them
    same_host: bool  # whether workers of one machine can exchange tensors through shared memory
    # whether a communicator runs its operations in the order of submission and ignores tags. A receive then blocks all
    # later operations, so two workers that send both ways at once need a communicator per direction.
    ordered: bool
    # whether a wait blocks the host until tensors have arrived, and raises if they cannot arrive. Otherwise it only
    # orders later work of the device, and the host must synchronize before it reads tensors.
    blocking_wait: bool


class Message:
    """Tensor to send to or receive from one peer under a tag."""

    __slots__ = ("peer", "tag", "tensor")

    def __init__(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self.tensor, self.peer, self.tag = tensor, peer, tag


class Communicator(NamedTuple):
    """Channel from one worker to another that no other transfer can block."""

    number: int  # number that distinguishes communicators between the same two workers
    sender: int  # rank that sends
    receiver: int  # rank that receives


class Work(Protocol):
    """Handle of a started operation, like ``torch.distributed.Work``."""

    def wait(self) -> object:
        """Wait until the operation is done. See :attr:`Capabilities.blocking_wait`."""


Started: TypeAlias = "list[tuple[Work, list[int]]]"  # started operations, each with the ranks of its peers


class TransportError(RuntimeError):
    """Error of a back end that refused to start a transfer."""

    def __init__(self, peers: Sequence[int], reason: RuntimeError) -> None:
        super().__init__(str(reason))
        self.peers = [*peers]


class Transport(Protocol):
    """Transport of tensors between the workers of torch's default process group."""

    capabilities: Capabilities
    backend: str  # back end of the process group, for ``init_process_group``

    def open(self) -> None:
        """Open the transport after the process group has been created. All workers must call this method together.

        Raises:
            RuntimeError: a connection failed.
        """

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        """Open the communicators that are needed and not yet open. Their workers must call this in the same order."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message], over: Communicator | None = None) -> Started:
        """Start sends and receives. Return the works of the receives, then of the sends, or one work for all of them.

        Args:
            receives: messages to receive. Between two workers, their order is the order of the sends.
            over: communicator to use. Defaults to that of all workers, which must submit transfers in matching order.

        Raises:
            TransportError: a peer cannot be reached.
        """

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Start an in-place sum of a tensor over all workers."""

    def synchronize(self, look: Callable[[float], None]) -> None:
        """Wait on the host until the device has finished its work, so that received tensors can be read.

        Args:
            look: called during the wait with the seconds waited. May raise.
        """

    def abort(self) -> None:
        """End all waits for other workers. Any thread may call this. Tensors that have not arrived are garbage."""
