"""A stream: the same batches wherever reading begins, its end, its states, and what is wrong with some."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.data.order import UNKNOWN
from paceline.data.streams.order import StreamOrder
from paceline.errors import InputError


class Counted(torch.utils.data.IterableDataset[int]):
    """Epoch e has 10 + e samples; how many were read is counted."""

    read = 0

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in range(10 + self.epoch):
            self.read += 1
            yield self.epoch, number


class Shuffled(Counted):
    """Its order and its values are random."""

    def __iter__(self) -> Iterator[Any]:
        numbers = [*range(10)]
        random.shuffle(numbers)
        for number in numbers:
            self.read += 1
            yield number, torch.rand(2).tolist(), random.random()


class Stateful(Shuffled):
    """It can go on from any sample, as those of ``datasets`` can."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.numbers = 0, [*range(10)]

    def __iter__(self) -> Iterator[Any]:
        if self.at == 0:
            random.shuffle(self.numbers)
        while self.at < len(self.numbers):
            self.at += 1
            self.read += 1
            yield self.numbers[self.at - 1], random.random()
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "numbers": self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.numbers = state["at"], state["numbers"]


class Buffered(Stateful):
    """A shuffle buffer, which is not in its state: what was in it is lost."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for item in super().__iter__():
            buffer.append(item[0])
            if len(buffer) == 3:
                yield buffer.pop(random.randrange(3))
        yield from buffer


def order_of(data: Any, **changes: Any) -> StreamOrder:
    return StreamOrder(data, **{"batch": 4, "microbatches": 2, "seed": 7, "drop_last": False} | changes)


def samples(order: StreamOrder, step: int) -> list[Any]:
    epoch, parts = order.epoch_of(step), order.microbatches_of(step)
    return [order.read(epoch, part) for part in parts]


def test_epochs_of_several_lengths() -> None:
    order = order_of(Counted())
    assert (order.epoch_of(0), order.first_of(1), order.end_of(1, 0)) == (0, UNKNOWN, UNKNOWN)
    sizes = [(order.epoch_of(step), order.samples_of(step), order.is_last(step)) for step in range(7)]
    assert sizes == [
        *[(0, 4, False), (0, 4, False), (0, 2, True)],
        *[(1, 4, False), (1, 4, False), (1, 3, True)],
        (2, 4, False),
    ]
    assert [order.samples_before(step) for step in range(7)] == [0, 4, 8, 10, 14, 18, 21]
    assert (order.end_of(1, 0), order.end_of(2, 0), order.end_of(1, 4)) == (3, 6, 6)
    assert [len(part) for part in samples(order, 2)] == [2]
    assert samples(order_of(Counted()), 5) == [[(1, 8), (1, 9)], [(1, 10)]]


@pytest.mark.parametrize(("length", "steps"), [(8, 2), (9, 2), (11, 2), (12, 3)])
def test_a_short_batch_is_dropped(length: int, steps: int) -> None:
    class Rows:
        def __iter__(self) -> Iterator[int]:
            return iter(range(length))

    order = order_of(Rows(), drop_last=True)
    assert [order.samples_of(step) for step in range(2 * steps)] == [4] * (2 * steps)
    assert [order.is_last(step) for step in range(steps)] == [False] * (steps - 1) + [True]
    assert order.samples_before(2 * steps) == 8 * steps


@pytest.mark.parametrize("kind", [Counted, Shuffled, Stateful, Buffered])
def test_the_batches_do_not_depend_on_where_reading_begins(kind: type) -> None:
    whole = order_of(kind())
    expected, states = {}, {}
    for step in range(7):
        states[step] = whole.state(step)
        expected[step] = samples(whole, step)
        torch.rand(3), random.random()  # what others draw in between
    drawn = [str(item) for step in range(3) for part in expected[step] for item in part]
    assert len(set(drawn)) == 10
    for step in range(7):
        resumed = order_of(kind())
        resumed.samples_of(0)
        resumed.load(states[step])
        assert resumed.epoch_of(step) == whole.epoch_of(step)
        for after in range(step, 7):
            assert samples(resumed, after) == expected[after], (step, after)
    for step in (6, 0, 5, 1, 1, 4):  # in any order, also what is kept no longer
        assert samples(whole, step) == expected[step]


def test_a_state_spares_reading() -> None:
    whole = order_of(Stateful())
    expected = [samples(whole, step) for step in range(3)]
    state = whole.state(2)
    resumed, data = order_of(data := Stateful()), data
    resumed.load(state)
    assert samples(resumed, 2) == expected[2]
    assert data.read == 2


def test_a_state_that_does_not_lead_there(caplog: pytest.LogCaptureFixture) -> None:
    whole = order_of(Buffered())
    expected = [samples(whole, step) for step in range(3)]
    resumed = order_of(Buffered())
    resumed.load(whole.state(2))
    assert samples(resumed, 2) == expected[2]
    assert "shuffle buffer" in caplog.text


def test_another_stream_is_refused() -> None:
    class Restless:
        def __init__(self) -> None:
            self.generator = itertools.count()

        def __iter__(self) -> Iterator[int]:
            return (next(self.generator) for _ in range(10))

    order = order_of(Restless())
    for step in range(3):
        samples(order, step)
    samples(order, 7)
    state = order.state(7)
    order._stream._batches.clear()
    with pytest.raises(InputError, match="another sample 0 in epoch 0"):
        samples(order, 0)
    other = order_of(Counted())
    for step in range(3, 7):
        samples(other, step)
    with pytest.raises(InputError, match="had 10 samples where the state comes from, and 11 here"):
        other.load(state)


def test_a_stream_that_is_used_up() -> None:
    once = iter(range(30))
    order = order_of(once)
    with pytest.raises(InputError, match="only once"):
        order.check_repeats()

    class Again:
        """It is its own iterator, and begins again."""

        def __iter__(self) -> Any:
            self.numbers = iter(range(10))
            return self

        def __next__(self) -> int:
            return next(self.numbers)

    order = order_of(Again())
    order.check_repeats()
    assert [samples(order, step) for step in (3, 4)] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_what_a_collate_takes_out_is_there_again() -> None:
    class Records:
        def __iter__(self) -> Iterator[dict[str, int]]:
            return ({"number": number} for number in range(5))

    order = order_of(Records())
    for _ in range(2):
        assert [item.pop("number") for part in samples(order, 0) for item in part] == [0, 1, 2, 3]
