"""Lists of tensors through the memory of one machine: whole, in order, and never over what is not read yet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TORCH = """
import torch
from functools import partial
import paceline
from paceline.comm.links.channel import TAGS, Receiver, Sender
from paceline.comm.shm.ring import LARGEST_BYTES
from subjects import tell

torch.manual_seed(0)
session = paceline.start(
    model=torch.nn.Linear(1, 1), optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), batch=8, timeout_seconds=30,
)
world = session._context.world
rings = world.rings(2)
"""
ROUNDS = """
def values(number):
    torch.manual_seed(number)
    return [
        torch.randn(3, 5), torch.randn(2, 2).bfloat16(), torch.arange(number), torch.tensor(number % 3 == 0),
        torch.randn(4, 6).t().contiguous(), torch.empty(0, 3), torch.randn(number % 7, 11, dtype=torch.float64),
    ]

different = 0
there, back = rings.ring(0, 1, 0), rings.ring(1, 0, 0)
for number in range(100):  # rank 0 runs ahead as far as there is room, later not at all
    expected = values(number)
    if world.rank == 0:
        there.send(expected)
        if number >= 50:
            answer = torch.empty(1, dtype=torch.int64)
            back.take([answer])
            different += int(answer) != number
    else:
        found = [torch.empty_like(value) for value in expected]
        there.take(found)
        different += sum(not torch.equal(one, other) for one, other in zip(found, expected))
        if number >= 50:
            back.send([torch.tensor([number])])
tell(different=different)
"""
KINDS = """
outlet = Sender(world, 1, TAGS, "a list", rings.ring(0, 1, 0))
inlet = Receiver(world, 0, TAGS, "a list", rings.ring(0, 1, 0))
torch.manual_seed(2)
turned = torch.randn(5, dtype=torch.complex64).conj()
many = [turned, turned.imag, torch.randn(4, 6).t(), torch.ones(3).expand(2, 3), torch.ones(2) > 0]
if world.rank == 0:
    outlet.send(1, many)
    outlet.finish()
    tell(same=True)
else:
    inlet.expect(1)
    tell(same=all(torch.equal(one, other) for one, other in zip(inlet.take(), many)))
"""
LARGE = """
sizes = [10, LARGEST_BYTES // 4, LARGEST_BYTES // 4 + 1, 7, LARGEST_BYTES, 1]
outlet = Sender(world, 1, TAGS, "a list", rings.ring(0, 1, 0))
inlet = Receiver(world, 0, TAGS, "a list", rings.ring(0, 1, 0))
if world.rank == 0:
    for turn in range(3):
        for size in sizes:
            outlet.send(size, [torch.full((size,), float(size + turn))])
    outlet.finish()
    tell(found=[])
else:
    found = []
    for turn in range(3):
        for size in sizes:
            inlet.expect(size)
        for size in sizes:
            (value,) = inlet.take()
            found.append(bool((value == size + turn).all()) and len(value) == size)
    tell(found=found)
"""


def test_lists_of_all_kinds_arrive_in_order(printed: Any, tmp_path: Path) -> None:
    assert printed(TORCH + ROUNDS, 2, tmp_path) == [{"different": 0}] * 2


def test_tensors_that_are_views_of_others_arrive_as_they_look(printed: Any, tmp_path: Path) -> None:
    assert printed(TORCH + KINDS, 2, tmp_path) == [{"same": True}] * 2


def test_those_that_are_too_large_go_over_the_network_without_losing_their_turn(printed: Any, tmp_path: Path) -> None:
    assert printed(TORCH + LARGE, 2, tmp_path)[1]["found"] == [True] * 18


def test_a_receiver_that_takes_nothing_is_named(ranks: Any, tmp_path: Path) -> None:
    waits = """
import time
world.timeout = 3.0
if world.rank == 0:
    outlet = Sender(world, 1, TAGS, "a list", rings.ring(0, 1, 0))
    for number in range(20):
        outlet.send(1, [torch.ones(1)])
time.sleep(60)
"""
    first, _ = ranks(TORCH + waits, 2, tmp_path, deadline=60, after_failure=0.1)
    assert first.code != 0 and re.search(r"Rank 0 waited \d+ s for rank 1 to take a list", first.err)
