"""Ring buffers between workers that are threads: all arrives in order, and the sender waits for room only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from thread_world import run

from paceline.comm.shm import ring
from paceline.comm.shm.ring import Ring, Rings, can_have

LISTS = 3 * ring._SLOTS + 1


def test_lists_arrive_in_order_in_both_directions() -> None:
    def act(world: Any) -> list[list[Any]]:
        rings = Rings(world.shared_memory, 3, 2)
        to, back = (world.rank + 1) % 3, (world.rank - 1) % 3
        found = []
        for number in range(LISTS):
            for kind in (0, 1):
                values = [torch.full((3,), float(10 * number + world.rank)), torch.tensor([kind])]
                rings.ring(world.rank, to, kind).send(values)
            for kind in (0, 1):
                values = [torch.zeros(3), torch.zeros(1, dtype=torch.int64)]
                rings.ring(back, world.rank, kind).take(values)
                found.append([value.tolist() for value in values])
        return found

    for rank, found in enumerate(run(3, act, hosts=[(0, 1, 2)])):
        sender = float((rank - 1) % 3)
        assert found == [[[10 * number + sender] * 3, [kind]] for number in range(LISTS) for kind in (0, 1)]


def test_a_sender_waits_until_there_is_room_and_no_longer() -> None:
    waits: list[tuple[int, int, list[int]]] = []
    told: list[tuple[int, int]] = []
    written: list[int] = []

    def write(offset: int, data: memoryview) -> int:
        written.append(offset)
        return len(data)

    memory: Any = SimpleNamespace(
        wait=lambda *given: waits.append(given), announce=lambda *given: told.append(given), write=write
    )
    one = Ring(memory, sent=(0, 11), taken=(1, 12), first_slot=5)
    for _ in range(LISTS):
        one.send([torch.zeros(2), torch.zeros(1)])
    assert waits == [(12, number, [1]) for number in range(1, LISTS - ring._SLOTS + 1)]
    assert told == [(11, number) for number in range(1, LISTS + 1)]
    firsts = [(5 + number % ring._SLOTS) * ring.LARGEST_BYTES for number in range(LISTS)]
    assert written == [offset for first in firsts for offset in (first, first + 8)]


def test_there_are_flags_for_few_workers_only() -> None:
    assert can_have(1, ring._MOST_FLAGS // 2) and not can_have(1, ring._MOST_FLAGS // 2 + 1)
    assert can_have(4, ring._MOST_FLAGS // 8) and not can_have(5, ring._MOST_FLAGS // 8)
