"""Waits for gloo end when another thread says so, whatever gloo does."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.comm.transport import gloo
from paceline.comm.transport.gloo import CollectiveWork, MessageWork, Waits


@pytest.fixture
def group() -> Iterator[Any]:
    """Rank 0 of two that are in this process; the other one never sends or calls anything."""
    store, made = dist.HashStore(), dict[int, Any]()

    def make(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    makers = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for one in makers:
        one.start()
    for one in makers:
        one.join()
    yield made[0]


def interrupted(waits: Waits, wait: Callable[[], None]) -> None:
    """Interrupt a wait once it is under way; it has to end long before the 60 seconds of the group."""

    def interrupt() -> None:
        while not waits._current:
            over.wait(0.001)
        waits.interrupt()

    over, thread = threading.Event(), threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(RuntimeError, match="interrupted, as another worker was lost"):
        wait()
    thread.join()


def test_a_receive_whose_message_never_comes(group: Any) -> None:
    waits = Waits()
    interrupted(waits, MessageWork(waits, group.recv([torch.zeros(4)], 1, 0)).wait)


def test_a_send_that_nobody_receives(group: Any) -> None:
    waits = Waits()
    interrupted(waits, MessageWork(waits, group.send([torch.zeros(1 << 22)], 1, 0)).wait)


class Collective:
    """One that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._future: torch.futures.Future[None] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[None]:
        return self._future

    def wait(self) -> None:
        self.ended.wait()

    def end(self) -> None:
        self.ended.set()
        self._future.set_result(None)


def holders() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "paceline-gloo"]


@pytest.mark.parametrize("waited", [True, False])
def test_an_interrupted_collective_is_held_until_it_ends(waited: bool) -> None:
    """Also one that nobody has waited for yet: to destroy its group would take as long."""
    waits, work = Waits(), Collective()
    begun = CollectiveWork(waits, work)
    if waited:
        interrupted(waits, begun.wait)
    else:
        waits.interrupt()
    (holder,) = holders()
    work.end()
    holder.join()


def test_a_collective_that_has_ended_is_not_held() -> None:
    waits, work = Waits(), Collective()
    begun = CollectiveWork(waits, work)
    work.end()
    begun.wait()
    waits.interrupt()
    assert holders() == []


def test_waits_are_possible_again_in_the_next_group() -> None:
    waits = Waits()
    waits.interrupt()
    with pytest.raises(RuntimeError, match="interrupted"):
        MessageWork(waits, Collective()).wait()
    waits.reset()
    work = Collective()
    work.end()
    MessageWork(waits, work).wait()


def test_torch_has_what_ends_a_wait() -> None:
    assert len(gloo._ABORTS) == 2
