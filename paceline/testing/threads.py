"""World of threads in memory: each worker is a thread of this process, so that a test needs no processes.

::

    from paceline.testing import threads

    assert threads.run(3, lambda world: world.gather(10 * world.rank, "a test")) == [[0, 10, 20]] * 3

Only the transport differs from a run: gathers, reductions and transfers are the code that trains. All threads share
torch's global random numbers and its process group, so code that uses either needs processes (``processes``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from paceline.comm.shm.arena import Arena, attach_hosts
from paceline.comm.transport.base import Communicator, Message, Started, TransportError, Work
from paceline.comm.transport.gloo import Gloo
from paceline.comm.world import World
from paceline.coordinator.types import Membership

_T = TypeVar("_T")
_SECONDS = 120.0
_POLL_SECONDS = 0.02


@dataclass
class Wires:
    """Tensors on their way by sender, receiver and tag, and the ranks of the workers that have ended."""

    queues: dict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def between(self, sender: int, receiver: int, tag: int) -> queue.SimpleQueue[torch.Tensor]:
        return self.queues.setdefault((sender, receiver, tag), queue.SimpleQueue())


class ThreadTransport:
    """Transport between threads. Waits for a worker that has ended, and sends to it, fail as with gloo.

    Args:
        blocking_wait: whether waits block. Otherwise tensors arrive in :meth:`synchronize`, as on GPUs.
    """

    backend = "gloo"

    def __init__(self, rank: int, size: int, wires: Wires, blocking_wait: bool = True) -> None:
        self.capabilities = Gloo(same_host=False).capabilities._replace(blocking_wait=blocking_wait)
        self._rank, self._size, self._wires = rank, size, wires
        self._arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sums = 0

    def open(self) -> None:
        """Do nothing, because threads need no connections."""

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        """Do nothing, because each tag has its own order."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message], over: Communicator | None = None) -> Started:
        for one in sends:
            if one.peer in self._wires.ended:
                raise TransportError([one.peer], RuntimeError("its thread has ended"))
            self._wires.between(self._rank, one.peer, one.tag).put(one.tensor.detach().clone())
        started: Started = [(_ThreadWork(partial(self._receive, one)), [one.peer]) for one in receives]
        return started + [(_ThreadWork(lambda: None), [one.peer]) for one in sends]

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        self._sums += 1
        values = [tensor.clone() if rank == self._rank else torch.empty_like(tensor) for rank in range(self._size)]
        others = [Message(value, rank, -self._sums) for rank, value in enumerate(values) if rank != self._rank]
        self.start([Message(tensor, one.peer, one.tag) for one in others], [])

        def wait() -> None:
            for one in others:
                one.tensor.copy_(self._take(one))
            tensor.copy_(torch.stack(values).sum(0))

        return _ThreadWork(wait)

    def synchronize(self, look: Callable[[float], None]) -> None:
        for tensor, value in self._arrived:
            tensor.detach().copy_(value)
        self._arrived.clear()

    def abort(self) -> None:
        """Do nothing, because the loss of a thread ends the waits for it."""

    def _receive(self, message: Message) -> None:
        value = self._take(message)
        assert (value.shape, value.dtype) == (message.tensor.shape, message.tensor.dtype), (
            "sent as another shape or type"
        )
        self._arrived.append((message.tensor, value))
        if self.capabilities.blocking_wait:
            self.synchronize(lambda _: None)

    def _take(self, message: Message) -> torch.Tensor:
        """Wait for a tensor of a peer. Raises RuntimeError if the peer has ended without sending it."""
        wire, until = self._wires.between(message.peer, self._rank, message.tag), time.monotonic() + _SECONDS
        while True:
            ended = message.peer in self._wires.ended  # before the look into the queue
            try:
                return wire.get(timeout=0 if ended else _POLL_SECONDS)
            except queue.Empty:
                if ended:
                    raise RuntimeError("its thread has ended") from None
                if time.monotonic() > until:
                    raise RuntimeError("timed out") from None


class _ThreadWork:
    """Started operation, whose wait calls a function."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


def run(
    size: int, act: Callable[[World], _T], hosts: Sequence[tuple[int, ...]] | None = None, blocking_wait: bool = True
) -> list[_T]:
    """Call a function in a thread for each worker, and return the results in rank order.

    Args:
        size: number of workers.
        act: function of the world of a worker.
        hosts: ranks of the workers on each machine, which then share real memory. By default, each is
            alone on a machine, and they share no memory.
        blocking_wait: see :class:`ThreadTransport`.

    Raises:
        Exception: the first error that the function has raised in any thread.
    """
    wires, results, errors = Wires(), dict[int, _T](), list[BaseException]()

    def work(rank: int) -> None:
        membership = Membership(rank, size, hosts=tuple(hosts or [(one,) for one in range(size)]))
        host_transport = ThreadTransport(rank, size, wires)
        transport = ThreadTransport(rank, size, wires, blocking_wait)
        world = World(membership, transport, host_transport, _SECONDS)
        try:
            if hosts is not None:
                world.enter(membership, transport, attach_hosts(world, Arena(), world.gather))
            results[rank] = act(world)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            if world.host_memory is not None:
                world.host_memory.give_up()
        wires.ended.add(rank)

    started = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
