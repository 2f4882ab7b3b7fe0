"""Ring buffers between workers that are threads: all arrives whole and in order, and the sender waits for room only."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_world import run

from paceline.comm.links.channel import TAGS, Receiver, Sender
from paceline.comm.shm import ring
from paceline.comm.shm.ring import LARGEST_BYTES, Ring, Rings, can_have
from paceline.comm.transport.base import Communicator
from paceline.errors import WorkerSilent

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


def test_a_sender_runs_ahead_as_far_as_there_is_room() -> None:
    generator = torch.Generator().manual_seed(1)
    lists = [
        [
            torch.randn(3, 5, generator=generator), torch.randn(2, 2, generator=generator).bfloat16(),
            torch.arange(number), torch.tensor(number % 3 == 0), torch.empty(0, 3),
            torch.randn(4, 6, generator=generator).t().contiguous(), torch.randn(number % 7, 11).double(),
        ]
        for number in range(100)
    ]  # fmt: skip

    def act(world: Any) -> list[list[torch.Tensor]]:
        rings = world.rings(2)
        there, back = rings.ring(0, 1, 0), rings.ring(1, 0, 0)
        found = []
        for number, expected in enumerate(lists):
            answers = number >= 50
            if world.rank == 0:
                there.send(expected)
                answer = torch.tensor([number])
                if answers:
                    back.take([answer := torch.empty(1, dtype=torch.int64)])
                assert int(answer) == number
            else:
                found.append([torch.empty_like(value) for value in expected])
                there.take(found[-1])
                if answers:
                    back.send([torch.tensor([number])])
        return found

    _, found = run(2, act, hosts=[(0, 1)])
    for one, expected in zip(found, lists, strict=True):
        assert all(torch.equal(value, other) for value, other in zip(one, expected, strict=True))


def test_tensors_that_are_views_of_others_arrive_as_they_look() -> None:
    turned = torch.tensor([1 + 2j, 3 - 4j]).conj()
    many = [turned, turned.imag, torch.arange(24.0).view(4, 6).t(), torch.ones(3).expand(2, 3), torch.ones(2) > 0]

    def act(world: Any) -> Any:
        line = world.rings(2).ring(0, 1, 0)
        if world.rank == 0:
            outlet = Sender(world, 1, TAGS, "a list", line)
            outlet.send(1, many)
            return outlet.finish()
        inlet = Receiver(world, 0, TAGS, "a list", line)
        inlet.expect(1)
        return inlet.take()

    _, found = run(2, act, hosts=[(0, 1)])
    assert all(torch.equal(one, other) for one, other in zip(found, many, strict=True))


def test_lists_that_are_too_large_go_over_the_network_without_losing_their_turn() -> None:
    sizes = [10, LARGEST_BYTES // 4, LARGEST_BYTES // 4 + 1, 7, LARGEST_BYTES, 1]

    def act(world: Any) -> list[bool]:
        line, found = world.rings(2).ring(0, 1, 0), []
        outlet, inlet = Sender(world, 1, TAGS, "a list", line), Receiver(world, 0, TAGS, "a list", line)
        world.open_communicators([Communicator(TAGS, 0, 1)])
        for turn in range(3):
            for size in sizes:
                if world.rank == 0:
                    outlet.send(size, [torch.full((size,), float(size + turn))])
                else:
                    inlet.expect(size)
            for size in sizes if world.rank else ():
                (value,) = inlet.take()
                found.append(bool((value == size + turn).all()) and len(value) == size)
        outlet.finish()
        if world.rank == 0:
            assert world.bytes_sent > 3 * 4 * LARGEST_BYTES, "the large ones are not in the ring"
        return found

    assert run(2, act, hosts=[(0, 1)])[1] == [True] * 18


def test_a_receiver_that_takes_nothing_is_named() -> None:
    over = threading.Event()

    def act(world: Any) -> None:
        line = world.rings(2).ring(0, 1, 0)
        if world.rank == 1:
            assert over.wait(60)
            return
        world.timeout = 0.2
        outlet = Sender(world, 1, TAGS, "a list", line)
        try:
            with pytest.raises(WorkerSilent, match=r"Rank 0 waited \d+ s for rank 1 to take a list"):
                for _ in range(20):
                    outlet.send(1, [torch.ones(1)])
        finally:
            over.set()

    run(2, act, hosts=[(0, 1)])
