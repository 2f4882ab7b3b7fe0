"""NCCL transport for tensors on GPUs. Each communicator runs its operations in order, and waits do not block the host.

The same process group moves tensors on the CPU through gloo. This transport has not yet been run on several GPUs: the
tests run its callers on ``tests/ordered_transport.py``, which waits and fails in the same ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from paceline.comm.transport.base import Capabilities, Communicator, Message, Started, TransportError, Work
from paceline.system.torch_internals import abort_default_group

_POLL_SECONDS = 5e-5


class Nccl:
    """Default process group for tensors on GPUs."""

    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, device: torch.device) -> None:
        self.capabilities = Capabilities(
            device=device, on_host=False, same_host=False, ordered=True, blocking_wait=False
        )
        self._groups: dict[Communicator, dist.ProcessGroup] = {}

    def open(self) -> None:
        """Create the communicator of all workers, before some of them use it without the others."""
        self._groups = {}
        dist.all_reduce(torch.zeros(1, device=self.capabilities.device))

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        """Create a group for each pair. The first operation in a group blocks the host until the other worker joins."""
        for one in communicators:
            if one not in self._groups:
                group = dist.new_group([one.sender, one.receiver], backend="nccl", use_local_synchronization=True)
                dist.all_reduce(torch.zeros(1, device=self.capabilities.device), group=group)
                self._groups[one] = group

    def start(self, sends: Sequence[Message], receives: Sequence[Message], over: Communicator | None = None) -> Started:
        group = None if over is None else self._groups[over]
        operations = [dist.P2POp(dist.irecv, one.tensor, one.peer, group=group, tag=one.tag) for one in receives]
        operations += [dist.P2POp(dist.isend, one.tensor, one.peer, group=group, tag=one.tag) for one in sends]
        peers = sorted({one.peer for one in (*sends, *receives)})
        try:
            return [(work, peers) for work in dist.batch_isend_irecv(operations)]
        except RuntimeError as error:
            raise TransportError(peers, error) from error

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        work: Work | None = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work

    def synchronize(self, look: Callable[[float], None]) -> None:
        done, begin = torch.cuda.Event(), time.monotonic()
        done.record()
        while not done.query():
            look(time.monotonic() - begin)
            time.sleep(_POLL_SECONDS)

    def abort(self) -> None:
        if dist.is_initialized():
            abort_default_group()
