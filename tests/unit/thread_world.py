"""Workers as threads of one process: what they send each other goes through queues, or through real shared memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from paceline.comm.shm.arena import Arena, SharedMemory, attach_hosts
from paceline.comm.shm.ring import Rings
from paceline.comm.transport.base import Communicator, Message
from paceline.comm.transport.gloo import Gloo
from paceline.comm.waiting import Waiting

T = TypeVar("T")
SECONDS = 120.0
"""No thread waits longer: then the code under test is wrong."""


class Wires:
    """What the workers of one world have in common."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.values: list[Any] = [None] * size
        self._queues: dict[tuple[int, int, int], queue.Queue[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def between(self, sender: int, receiver: int, tag: int) -> queue.Queue[torch.Tensor]:
        """What is on its way from one to another under a tag."""
        with self._lock:
            return self._queues.setdefault((sender, receiver, tag), queue.Queue())


Late: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""What has come, and where it goes when the host waits for the device."""


class Receive:
    """A receive under way."""

    def __init__(self, wires: Wires, message: Message, rank: int, late: Late | None) -> None:
        self._late = late
        self._queue = wires.between(message.peer, rank, message.tag)
        self._into = message.tensor

    def wait(self) -> None:
        received = self._queue.get(timeout=SECONDS)
        assert received.shape == self._into.shape and received.dtype == self._into.dtype
        if self._late is None:
            self._into.copy_(received)
        else:
            self._late.append((self._into, received))


class Sent:
    """A send; it is done, as the queue has a copy."""

    def wait(self) -> None:
        pass


class Sum:
    """An all-reduce under way."""

    def __init__(self, world: ThreadWorld, tensor: torch.Tensor) -> None:
        self._world, self._into = world, tensor

    def wait(self) -> None:
        self._into.copy_(torch.stack(self._world.gather(self._into.clone(), "sum")).sum(0))


class ThreadWorld(Waiting):
    """The part of ``comm.world.World`` that reductions and transfers of the state need.

    Attributes:
        bytes_sent: over the queues.
        gathered: what the gathers were for, in their order.
        late: set to a list, a wait does not block, as on GPUs: tensors are valid after ``synchronize`` only.
        host: whether each list of transfers was said to be of tensors on the host.
    """

    transport: Any = Gloo(same_host=False)
    shared_memory: SharedMemory | None = None
    host_memory: SharedMemory | None = None
    generation = 0
    leaving = False
    device = torch.device("cpu")

    def __init__(self, rank: int, size: int, wires: Wires, hosts: Sequence[tuple[int, ...]] | None) -> None:
        super().__init__(rank, size, SECONDS)
        self._wires = wires
        self.hosts = tuple(hosts or [(one,) for one in range(size)])
        self.bytes_sent, self.gathered, self.host = 0, list[str](), list[bool]()
        self.late: Late | None = None
        self.opened = set[Communicator]()
        self.end_servers: Callable[[], None] = lambda: None
        if hosts is not None:
            self.host_memory = attach_hosts(self, Arena(), self.hosts, self.gather)
            self.shared_memory = self.host_memory if len(self.hosts) == 1 else None

    def gather(self, value: Any, what: str) -> list[Any]:
        self.gathered.append(what)
        self._wires.values[self.rank] = value
        self._wires.barrier.wait()
        values = list(self._wires.values)
        self._wires.barrier.wait()
        return values

    def start_transfers(
        self,
        sends: list[Message],
        receives: list[Message],
        where: str = "",
        over: Communicator | None = None,
        host: bool = False,
    ) -> list[Any]:
        assert host or over is None or over in self.opened
        assert self.rank not in {one.peer for one in (*sends, *receives)}, "to itself"
        self.host.append(host)
        for one in sends:
            self.bytes_sent += one.tensor.nbytes
            self._wires.between(self.rank, one.peer, one.tag).put(one.tensor.clone())
        return [*(Receive(self._wires, one, self.rank, self.late) for one in receives), *(Sent() for _ in sends)]

    def start_all_reduce(self, tensor: torch.Tensor) -> Sum:
        return Sum(self, tensor)

    def notice(self) -> int:
        return 0

    def rings(self, count: int) -> Rings | None:
        return None if self.shared_memory is None else Rings(self.shared_memory, self.size, count)

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        self.opened |= set(communicators)

    def confirm(self, step: int) -> None:
        pass

    def await_process_group(self) -> None:
        pass

    def synchronize(self) -> None:
        for into, received in self.late or ():
            into.copy_(received)


def run(size: int, act: Callable[[Any], T], hosts: Sequence[tuple[int, ...]] | None = None) -> list[T]:
    """Let each worker do this, and return what each found; with ``hosts`` those of a machine share memory."""
    wires, found, errors = Wires(size), dict[int, T](), list[BaseException]()

    def work(rank: int) -> None:
        try:
            found[rank] = act(ThreadWorld(rank, size, wires, hosts))
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            wires.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error
    return [found[rank] for rank in range(size)]
