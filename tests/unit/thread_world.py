"""Workers as threads of one process, and what they send each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from paceline.comm.transport.base import Communicator, Message
from paceline.comm.world import World
from paceline.testing import threads

T = TypeVar("T")


class ThreadWorld(World):
    """A world of threads that keeps account of what goes through it.

    Attributes:
        bytes_sent: in transfers, without gathers.
        gathered: what the gathers were for, in their order.
        host: whether each list of transfers was said to be of tensors on the host.
    """

    bytes_sent: int
    gathered: list[str]
    host: list[bool]
    opened: set[Communicator]

    def gather(self, value: Any, what: str) -> list[Any]:
        self.gathered.append(what)
        before = self.bytes_sent, len(self.host)
        values = super().gather(value, what)
        self.bytes_sent = before[0]
        del self.host[before[1] :]
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
        self.bytes_sent += sum(one.tensor.nbytes for one in sends)
        return super().start_transfers(sends, receives, where, over, host)

    def open_communicators(self, communicators: Iterable[Communicator]) -> None:
        self.opened |= set(communicators)


def run(
    size: int, act: Callable[[Any], T], hosts: Sequence[tuple[int, ...]] | None = None, blocking_wait: bool = True
) -> list[T]:
    """Let each worker do this, and return what each found; with ``hosts`` those of a machine share memory."""

    def counted(world: Any) -> T:
        world.__class__ = ThreadWorld
        world.bytes_sent, world.gathered, world.host, world.opened = 0, [], [], set()
        return act(world)

    return threads.run(size, counted, hosts, blocking_wait)
