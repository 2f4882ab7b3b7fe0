"""A world of threads: its errors are those of processes, and its waits may be those of GPUs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from paceline.comm.transport.base import Message
from paceline.errors import DisagreementError, WorkerLost
from paceline.testing import threads


@pytest.mark.parametrize("hosts", [None, [(0, 1, 2)], [(0, 2), (1,)]], ids=["network", "memory", "both"])
def test_a_thread_that_fails_is_lost_for_the_others(hosts: Any) -> None:
    lost: dict[int, WorkerLost] = {}

    def act(world: Any) -> None:
        if world.rank == 1:
            raise KeyError("the cause")
        with pytest.raises(WorkerLost) as raised:
            world.gather(None, "a test")
        lost[world.rank] = raised.value

    with pytest.raises(KeyError, match="the cause"):
        threads.run(3, act, hosts)
    assert sorted(lost) == [0, 2] and any("rank 1" in str(one) for one in lost.values())


def test_a_wait_for_a_thread_ends_with_it() -> None:
    def act(world: Any) -> str:
        messages = [Message(torch.zeros(1), 1 - world.rank, 5) for _ in range(2)]
        if world.rank == 1:  # when it ends, the other one has sent all
            world.start_transfers([], messages[:1], "here")[0].wait()
            return ""
        (receive, _) = world.start_transfers(messages[:1], messages[1:], "in a test")
        with pytest.raises(WorkerLost) as raised:
            receive.wait()
        return str(raised.value)

    assert threads.run(2, act)[0].startswith("Rank 0: lost rank 1 in a test.")


def test_threads_at_different_places() -> None:
    with pytest.raises(DisagreementError, match="rank 0 in one, rank 1 in two"):
        threads.run(2, lambda world: world.gather(None, ["one", "two"][world.rank]))


@pytest.mark.parametrize("blocking_wait", [True, False])
def test_tensors_arrive_when_a_wait_is_over_or_the_device_is_waited_for(blocking_wait: bool) -> None:
    def act(world: Any) -> tuple[float, float, float]:
        tensor, other = torch.full((3,), float(world.rank)), 1 - world.rank
        received = torch.full((3,), -1.0)
        for transfer in world.start_transfers([Message(tensor, other, 5)], [Message(received, other, 5)]):
            transfer.wait()
        tensor += 10.0  # the peer has a copy
        before = received[0].item()
        world.synchronize()
        total = torch.tensor([1.5 + world.rank])
        world.start_all_reduce(total).wait()
        return before, received[0].item(), total.item()

    expected = [(1.0, 1.0, 4.0), (0.0, 0.0, 4.0)]
    assert threads.run(2, act, blocking_wait=blocking_wait) == [
        one if blocking_wait else (-1.0, *one[1:]) for one in expected
    ]


def test_waits_for_earlier_workers_are_not_those_of_the_next_step() -> None:
    """The ranks of the next membership are those of others."""
    event = threading.Event()

    def act(world: Any) -> Any:
        if world.rank == 1:
            assert event.wait(60)
            return world.gather(None, "a test") and None
        threading.Timer(0.05, event.set).start()
        world.gather(None, "a test")
        assert world._waited_for == {1: world._waited} and world._waited > 0
        world.enter(world.membership, world.transport, world.host_memory)
        return world.take_waits()

    assert threads.run(2, act)[0] == (0.0, 0.0, None, [])
