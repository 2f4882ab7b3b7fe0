"""What a change of the members, a rendezvous and a step cost with P workers, counted on the code that decides it.

No socket and no process: the coordinator's own classes are driven by hand, the reductions by a world that counts. Eight
workers are on each machine.

    python bench/scale/protocol.py                  # 16, 64, 256 and 1,024 workers
    python bench/scale/protocol.py --workers 64 512
"""

from __future__ import annotations

import argparse
import math
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from paceline.comm.collectives.step_header import header_bytes
from paceline.comm.reduction.direct import DirectExchange
from paceline.comm.reduction.exchange import Exchange
from paceline.comm.reduction.executor import Reduction
from paceline.comm.reduction.hierarchical import HierarchicalExchange
from paceline.comm.shm.arena import SharedMemory
from paceline.comm.transport.base import Message as TensorMessage
from paceline.comm.world import World
from paceline.coordinator.key_values import KeyValues
from paceline.coordinator.membership import MembershipProtocol
from paceline.coordinator.types import Bounds, Message
from paceline.coordinator.wire.messages import encode
from paceline.events import EventLog
from paceline.schedule.tree import Node

PER_MACHINE = 8
GRADIENT_BYTES = 4 * 2**20
"""Of the model of the table, in one bucket: the messages do not depend on it, the bytes are given as multiples."""
Row = tuple[str, float, int, int]
"""What, and its seconds, messages and bytes: at the coordinator, or of one worker in a step."""


class Counting:
    """Membership whose messages are counted as they would be sent: encoded once for all receivers."""

    def __init__(self, size: int) -> None:
        self.messages = self.bytes = 0
        bounds = Bounds(1, size + 1, size, patience=60.0, drops=True)
        self.of = MembershipProtocol(bounds, self._send, lambda event, **_: None)

    def _send(self, numbers: Sequence[int], message: Message) -> None:
        if numbers:
            self.messages += len(numbers)
            self.bytes += len(numbers) * len(encode(message))

    def take(self) -> tuple[int, int]:
        """The messages and bytes since the last call."""
        found, self.messages, self.bytes = (self.messages, self.bytes), 0, 0
        return found

    def come(self, number: int) -> None:
        """A worker starts, and is ready."""
        place = number // PER_MACHINE
        about = {"host": f"node{place:04}", "pid": 10_000 + number, "address": f"10.0.{place // 250}.{place % 250}"}
        self.of.started(number)
        self.of.register(number, {**about, "arena": [9, f"{number:032x}"]}, {})
        self.of.ready(number, None, 0.0)


def changes(size: int) -> list[Row]:
    """The start, one lost, one joined, one left."""
    counting = Counting(size)
    of = counting.of
    for number in range(size):
        of.started(number)
    rows = []
    for name in ("start", "one lost", "one joined", "one left"):
        begin = time.perf_counter()
        if name == "start":
            for number in range(size):
                counting.come(number)
        elif name == "one lost":
            of.lose(size // 2, "it was killed", 1.0)
        elif name == "one joined":
            counting.come(size)
        for number in of.members if of.generation >= 0 and name != "start" else ():
            if of.workers[number].state == "training":
                of.ready(number, (5, 0), 1.0, leaving=name == "one left" and number == size, planned=True)
        rows.append((name, time.perf_counter() - begin, *counting.take()))
    assert of.generation == len(rows) - 1
    return rows


def gloo_rendezvous(size: int) -> Row:
    """gloo's full mesh: each worker sets one key, then waits for and gets that of each, as torch 2.13 asks."""
    value = b64encode(bytes(154 + 8 * size)).decode()  # the name and address of its machine, and 8 bytes for each peer
    messages = sent = 0

    def answer(number: int, message: Message) -> None:
        nonlocal messages, sent
        messages += 1
        sent += len(encode(message))

    store = KeyValues(answer)
    ask = {"type": "store", "generation": 0, "expected": "", "value": ""}
    begin = time.perf_counter()
    for rank in range(size):
        store.handle(rank, {**ask, "do": "set", "call": None, "keys": [f"0/{rank}"], "value": value})
    for rank in range(size):
        for peer in range(size):
            for do in ("wait", "take"):
                store.handle(rank, {**ask, "do": do, "call": peer, "keys": [f"0/{peer}"]})
    return "torch's group (gloo)", time.perf_counter() - begin, messages, sent


class CountingWorld:
    """What a reduction needs of the workers, as rank 0 sees them; counts what it sends."""

    rank, alarmed, device = 0, False, torch.device("cpu")

    def __init__(self, size: int) -> None:
        self.size = size
        self.hosts = tuple(tuple(range(at, at + PER_MACHINE)) for at in range(0, size, PER_MACHINE))
        self.messages = self.bytes = 0

    def start_transfers(
        self, sends: list[TensorMessage], receives: list[TensorMessage], where: str = "", host: bool = False
    ) -> list[Any]:
        self.messages += len(sends)
        self.bytes += sum(message.tensor.nbytes for message in sends)
        return [Done()] * (len(sends) + len(receives))

    def check(self) -> None:
        pass

    def awaiting(self, purpose: str) -> Done:
        return Done()

    def receiving(self) -> Done:
        return Done()


class Done:
    """A transfer, and a context."""

    def wait(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Memory:
    """The shared memory of one machine, of which one worker alone is here."""

    ranks, place = tuple(range(PER_MACHINE)), 0

    def share(self, size: int) -> list[bytearray]:
        return [bytearray(size) for _ in self.ranks]

    def reserve(self, slots: int) -> int:
        return 0

    def wait(self, *_: object) -> None:
        pass

    def announce(self, *_: object) -> None:
        pass


def step(size: int, make: Callable[[World], Exchange]) -> tuple[int, int]:
    """The messages and bytes that rank 0 sends in a step, each worker with one node of the tree."""
    counting = CountingWorld(size)
    world, tensors = cast(World, counting), [torch.zeros(GRADIENT_BYTES // 4)]
    reduction = Reduction(world, make(world), tensors, EventLog(None, 0), "gradients", GRADIENT_BYTES)
    reduction.begin([[Node(0, rank)] for rank in range(size)], 1.0)
    reduction.written(0)
    reduction.finish()
    return counting.messages, counting.bytes


def steps(size: int) -> list[Row]:
    """What a worker sends in a step."""

    def hierarchical(world: World) -> Exchange:
        return HierarchicalExchange(world, cast(SharedMemory, Memory()))

    return [
        ("step header", 0.0, size - 1, (size - 1) * header_bytes(1)),
        ("tree, a bucket", 0.0, *step(size, DirectExchange)),
        ("hierarchical, a bucket", 0.0, *step(size, hierarchical)),
    ]


def growth(values: Sequence[float], sizes: Sequence[int]) -> str:
    """Name the growth from the last two sizes."""
    if len(values) < 2 or not values[-2]:
        return ""
    power = math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])
    return next(name for most, name in ((0.3, "O(1)"), (1.4, "O(P)"), (2.4, "O(P^2)"), (9, "O(P^3)")) if power < most)


def main(sizes: list[int]) -> None:
    """Print the table."""
    rows = {size: [*changes(size), gloo_rendezvous(size), *steps(size)] for size in sizes}
    print(f"{'':24}" + "".join(f"{f'{size:,} workers':>34}" for size in sizes) + "  growth: messages, bytes")
    for place, (name, *_) in enumerate(rows[sizes[0]]):
        cells = []
        for size in sizes:
            _, seconds, messages, sent = rows[size][place]
            spent = f"{seconds:.3f} s" if seconds else ""
            cells.append(f"{spent:>9} {messages:>9,} {sent:>14,}")
        of = [growth([rows[size][place][part] for size in sizes], sizes) for part in (2, 3)]
        print(f"{name:24}" + "".join(cells) + "  " + ", ".join(of))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64, 256, 1024])
    main(parser.parse_args().workers)
