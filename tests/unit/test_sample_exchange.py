"""Samples that workers send to others: what arrives is what was collated, whatever its size, shape and strides."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data import Located
from paceline.data.feed import Feed
from paceline.data.located.exchange import SampleExchange
from paceline.data.located.order import LocatedOrder
from paceline.errors import InputError, WorkerLost
from paceline.schedule.placement import Move
from paceline.testing import threads

STEPS = {0: [Move(0, 0, 1), Move(1, 0, 2)], 1: [Move(3, 2, 1), Move(0, 0, 1)], 2: [], 3: [Move(0, 1, 0), Move(2, 0, 1)]}


def batch(step: int, microbatch: int) -> dict[str, Any]:
    images = torch.full((2, 3, 4, 5), step + 0.1).to(memory_format=torch.channels_last)
    ragged = torch.arange(100 * (step + 1) * (microbatch + 1))  # often more than is expected
    return {"images": images, "inputs": (ragged, np.float32(microbatch)), "names": ["a", "b"], "step": step}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    images, (ragged, number) = right["images"], right["inputs"]
    assert left["images"].stride() == images.stride() and left["images"].equal(images)
    assert left["inputs"][0].equal(ragged) and left["inputs"][1] == number and type(left["inputs"][1]) is np.float32
    return (left["names"], left["step"]) == (right["names"], right["step"])


def exchange_of(world: Any) -> SampleExchange:
    return SampleExchange(world, STEPS.__getitem__, lambda step, microbatch: 1000 * step)


def test_what_arrives_is_what_was_collated() -> None:
    """Also if the script leaves out the batches of steps 0 and 1, so that nobody takes their samples."""

    def worker(world: Any) -> list[int]:
        exchange, sizes = exchange_of(world), []
        for step in STEPS:
            exchange.begin(step, {one.start: batch(step, one.start) for one in exchange.sent(step)})
            sizes.append(exchange.bytes[step])
        for step in (2, 3):
            expected = {one.microbatch for one in STEPS[step] if one.worker == world.rank}
            for _ in range(2):  # an audit takes a microbatch that is then computed
                assert expected == {
                    number for number, data in exchange.take(step).items() if same(data, batch(step, number))
                }
        assert not exchange.is_begun(1) and [exchange.awaits(3, range(one, one + 1)) for one in (0, 2)] == [
            world.rank == 0,
            world.rank == 1,
        ]
        return sizes

    sizes = threads.run(3, worker)
    assert [bool(one) for one in zip(*sizes, strict=True) for one in one] == [
        *(True, False, False),
        *(True, False, True),
        *(False, False, False),
        *(True, True, False),
    ]


def test_the_loss_of_a_sender_ends_the_wait_for_it() -> None:
    def worker(world: Any) -> None:
        if world.rank == 1:
            exchange = exchange_of(world)
            exchange.begin(0, {})
            with pytest.raises(WorkerLost, match=r"rank 0.*while it waited for samples of step 0"):
                exchange.take(0)

    threads.run(2, worker)


def test_a_loss_while_samples_are_sent_ahead_is_raised_in_the_step() -> None:
    """Between steps the workers could not re-form."""

    def worker(world: Any) -> None:
        own = {"a": [torch.ones(2)] * 16} if world.rank == 0 else {}
        data = Located(own, move="samples")
        order = LocatedOrder(data, 8, 2, seed=0, exact=True)
        order.meet(world, "start")
        if world.rank == 1:
            return
        while 1 not in world.host_transport._wires.ended:
            time.sleep(0.001)
        feed = Feed(data, order, world.device)
        (group,) = next(feed.steps(0, 2, lambda step: [range(1)]))
        with pytest.raises(WorkerLost, match=r"rank 1.*while it sent samples of step 0"):
            feed.receive(0, [group], SimpleNamespace())  # type: ignore[arg-type]

    threads.run(2, worker)


def test_a_batch_that_cannot_be_sent_is_refused() -> None:
    def worker(world: Any) -> None:
        if world.rank == 0:
            with pytest.raises(InputError, match=r"step 0 cannot be sent .*SimpleNamespace.* Collate tensors"):
                exchange_of(world).begin(0, {0: SimpleNamespace(), 1: SimpleNamespace()})

    threads.run(3, worker)
