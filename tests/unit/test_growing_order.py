"""Data that grow: what each epoch has, what is stored, and what a state adds to another one."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch

from paceline.data import Growing
from paceline.data.growing import samples as store
from paceline.data.growing.agreement import encoded
from paceline.data.growing.order import Additions, GrowingOrder
from paceline.data.order import UNKNOWN, Order
from paceline.errors import InputError
from paceline.schedule.microbatch_orders import in_turn

BATCH = 4


def order_of(initial: int = 0, drop_last: bool = False) -> GrowingOrder:
    return GrowingOrder(Growing(range(initial)), BATCH, 2, 0, drop_last)


def extend(order: GrowingOrder, count: int, steps: int, epoch: int = -1, begun: int | None = None) -> None:
    """The script adds samples after ``steps`` steps, named by their number in the data set."""
    first = len(order.data)
    additions = Additions(encoded([*range(first, first + count)]), steps, steps if begun is None else begun)
    order.add_result("extend", (steps, epoch, 0), additions)


def epoch_at(order: GrowingOrder, step: int) -> list[int]:
    """The samples of the epoch of a step, in order."""
    first = order.first_of(order.epoch_of(step))
    steps = range(first, first + order.steps_at(step))
    return [number for one in steps for part in order.microbatches_of(one) for number in part]


def test_without_additions_the_order_is_that_of_a_data_set_of_fixed_length() -> None:
    grows, fixed = order_of(10), Order(10, BATCH, 2, 0)
    for step in range(9):
        assert grows.place_of(step) == fixed.place_of(step)
        assert grows.microbatches_of(step) == fixed.microbatches_of(step)
        assert grows.samples_before(step) == fixed.samples_before(step) and grows.is_last(step) == fixed.is_last(step)
    assert grows.end_of(2, 3) == fixed.end_of(2, 3) == 9


def test_an_epoch_that_is_running_keeps_its_samples_and_the_next_has_the_new_ones() -> None:
    order = order_of(10)  # 3 steps
    before = epoch_at(order, 0)
    extend(order, 3, 1)
    extend(order, 4, 2)
    assert epoch_at(order, 0) == before and order.first_of(1) == 3
    assert sorted(epoch_at(order, 3)) == [*range(17)] and order.steps_at(3) == 5
    assert epoch_at(order, 3) != epoch_at(order, 8), "another shuffle in each epoch"
    extend(order, 1, 8)  # after the last step of epoch 1: epoch 2 has not begun
    assert sorted(epoch_at(order, 8)) == [*range(18)]
    extend(order, 1, 8, begun=9)  # the script has got the batch of step 8
    assert sorted(epoch_at(order, 8)) == [*range(18)] and sorted(epoch_at(order, 13)) == [*range(19)]
    assert [order.samples_before(step) for step in (0, 1, 3, 4, 8, 12, 13)] == [0, 4, 10, 14, 27, 43, 45]
    shuffle = Order(17, BATCH, 2, 0)
    assert order.microbatches_of(4) == shuffle.microbatches_of(shuffle.first_of(1) + 1)


@pytest.mark.parametrize(("initial", "drop_last"), [(0, False), (3, True)])
def test_a_data_set_without_a_batch_waits_for_samples(initial: int, drop_last: bool) -> None:
    order = order_of(initial, drop_last)
    assert order.place_of(0) == (0, 0) and order.first_of(0) == 0
    assert order.first_of(1) == UNKNOWN
    for call in (lambda: order.steps_at(0), lambda: order.samples_of(0), lambda: order.microbatches_of(0)):
        with pytest.raises(InputError, match=r"The data set (is empty|has 3 samples, less).*call session.extend"):
            call()
    extend(order, 5, 0)
    extend(order, 2, 0)
    assert order.first_of(1) == 2 and order.epoch_of(0) == 0
    assert len(epoch_at(order, 0)) == (8 if drop_last else 7)


def test_a_state_has_what_was_added_when_its_last_step_returned() -> None:
    order = order_of(10)
    for steps in (0, 1, 3, 3):
        extend(order, 2, steps)
    for steps, count in ((0, 0), (1, 2), (3, 4), (4, 8)):
        loaded = order_of(10)
        loaded.load(order.state(steps))
        assert len(loaded.data) == 10 + count, steps
    assert loaded.microbatches_of(5) == order.microbatches_of(5)
    assert loaded.results("extend", (3, -1, 0)) == [2, 3] and loaded.results("extend", (2, -1, 0)) == []
    loaded.load(order.state(1))  # of an earlier checkpoint: the longer state stays
    assert [*loaded.data] == [*order.data] == [*range(18)]
    order.load(loaded.state(9))
    assert len(order.data) == 18 and order.entries == 4


def test_the_rest_of_a_log_is_added_to_its_beginning() -> None:
    order, short, shorter = order_of(), order_of(), order_of()
    for steps in range(5):
        extend(order, 3, steps)
    short.load(order.state(2))
    assert short.entries == 2
    for one in (short, shorter):
        one.load(order.state_from(one.entries and 1))
        assert [*one.data] == [*range(15)] and one.entries == 5
        assert [one.microbatches_of(step) for step in range(9)] == [order.microbatches_of(step) for step in range(9)]


def test_the_length_is_that_at_the_position_of_the_script() -> None:
    """A resumed script has passed the calls that it has made, those of earlier epochs, and those before its batch."""
    order = order_of(8)
    for epoch, steps in ((0, 1), (0, 2), (1, 2), (1, 4)):
        extend(order, 1, steps, epoch)
    for given, epoch, made, count in (
        *((-1, None, 0, 0), (-1, None, 1, 1), (-1, 0, 0, 0), (-1, 1, 0, 2), (-1, 1, 3, 3), (-1, 2, 0, 4)),
        *((1, 0, 0, 1), (2, None, 0, 3), (3, 1, 0, 3), (4, 1, 0, 4)),
    ):
        assert order.count_at(given, epoch, made) == count, (given, epoch, made)


def same(found: Any, given: Any) -> bool:
    if isinstance(given, torch.Tensor | numpy.ndarray):
        equal = type(found) is type(given) and found.dtype == given.dtype and found.shape == given.shape
        return (
            equal and found.tobytes() == given.tobytes()
            if isinstance(given, numpy.ndarray)
            else torch.equal(found, given)
        )
    if isinstance(given, dict):
        return list(found) == list(given) and all(same(found[key], given[key]) for key in given)
    if isinstance(given, list | tuple):
        return type(found) is type(given) and len(found) == len(given) and all(map(same, found, given))
    return type(found) is type(given) and (found == given or (math.isnan(found) and math.isnan(given)))


def test_samples_of_all_types_are_read_as_they_were_added() -> None:
    given = [
        (torch.arange(6.0).reshape(2, 3).t(), torch.tensor(True), torch.zeros(0, 3, dtype=torch.bfloat16)),
        {"state": numpy.arange(4, dtype="float32"), "reward": -0.5, "done": False, "name": "a", "none": None, 3: b"x"},
        [numpy.float32(0.1), (1, [2, ()]), math.nan],
        numpy.array(2.5),
    ]
    data = Growing(["first"])
    data.added.add(encoded(given))
    assert len(data) == 5 and same([*data], ["first", *given])
    data[1][0].zero_()
    assert same(data[1], given[0]), "each read is a new copy"
    for number in (-1, 5):
        with pytest.raises(IndexError, match=rf"sample {number} of 5"):
            data[number]


def test_blocks_are_bounded_and_follow_from_the_samples_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BLOCK_BYTES", 100)
    samples = [bytes([number]) * size for number, size in enumerate([30, 30, 30, 30, 250, 10, 90, 1])]
    once, often = store.Store(), store.Store()
    once.add(samples)
    for sample in samples:
        often.add([sample])
    blocks = once.tensors(0, len(samples))
    assert [len(data) for data, _ in blocks] == [90, 30, 250, 100, 1]
    assert [[one.tolist() for one in block] for block in often.tensors(0, 8)] == [
        [one.tolist() for one in block] for block in blocks
    ]
    for start in range(8):
        for stop in range(start + 1, 9):
            assert [*store.samples_in(once.tensors(start, stop))] == samples[start:stop]
    held = once.tensors(0, 8)
    once.add([b"more"])  # while a save holds the tensors
    assert [*store.samples_in(held)] == samples


@pytest.mark.parametrize("samples", [3, "abc", iter([1]), {1}, Growing()])
def test_what_growing_refuses(samples: Any) -> None:
    with pytest.raises(InputError, match="Growing takes the samples before training as a data set with a length"):
        Growing(samples)


def test_what_extend_refuses() -> None:
    with pytest.raises(InputError, match=r"takes a list of samples.*got a Tensor. Write session.extend\(\[sample\]\)"):
        encoded(torch.zeros(3))
    with pytest.raises(InputError, match=r"cannot keep sample 1 of 2: .* is a builtins.object, which cannot be sent"):
        encoded([1, (object(),)])


def test_a_microbatch_order_cuts_the_batches_of_every_epoch() -> None:
    order = order_of(10)
    order.cut_by(in_turn)
    facts, batch = order.facts(), [*order.numbers_of(0)]
    extend(order, 3, 0, begun=0)  # before the first batch
    extend(order, 4, 2)
    assert order.facts() == facts, "a resumed run compares them before it has the samples"
    assert order.microbatches_of(5) == in_turn(order.numbers_of(5), 2) and sorted(epoch_at(order, 4)) == [*range(17)]
    assert order.numbers_of(0) != batch
    empty = order_of()
    empty.cut_by(in_turn)
    extend(empty, 5, 0)
    assert sorted(epoch_at(empty, 0)) == [*range(5)]
