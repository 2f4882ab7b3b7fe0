"""Shards that are streams: their order, what workers tell each other of them, and how reading goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from paceline.data import Located
from paceline.data.feed import Feed
from paceline.data.located import order as order_module
from paceline.data.located.order import LocatedOrder
from paceline.data.order import UNKNOWN
from paceline.data.streams import reader
from paceline.errors import ConfigError, DisagreementError, InputError
from paceline.testing import threads

SIZES = {"a": 7, "b": 61, "c": 40, "d": 1, "e": 22}
MICROBATCHES, SIZE = 8, 3


class Rows(IterableDataset[Any]):
    """Epoch e has e samples more. How many were read is counted."""

    def __init__(self, name: str, size: int | None) -> None:
        self.name, self.size, self.epoch, self.read = name, size, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while self.size is None or number < self.size + self.epoch:
            self.read += 1
            yield self.name, self.epoch, number
            number += 1


class Stateful(Rows):
    """It can go on from any sample, by a state that cannot be sent if ``sendable`` is False."""

    sendable = True
    at = 0

    def __iter__(self) -> Iterator[Any]:
        assert self.size is not None
        while self.at < self.size + self.epoch:
            self.read += 1
            self.at += 1
            yield self.name, self.epoch, self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at} | ({} if self.sendable else {"other": object()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Evolving(Stateful):
    """What it gives in a pass follows from its own state, not from the number of the epoch."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        for name, _, number in super().__iter__():
            yield name, self.passes, number
        self.passes += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.passes = state["at"], state["passes"]


class Once(Rows):
    """It gives nothing after the first pass."""

    def __iter__(self) -> Iterator[Any]:
        if self.epoch == 0:
            yield from super().__iter__()


@pytest.fixture(autouse=True)
def without_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads share the global generators."""
    monkeypatch.setattr(reader, "seed_untouched", lambda: None)
    monkeypatch.setattr(reader, "was_drawn", lambda: False)
    monkeypatch.setattr(order_module, "preserve_generators", nullcontext)


def order_of(names: str = "abcde", kind: type[Rows] = Rows, **changed: Any) -> LocatedOrder:
    shards = {name: changed.get(name, kind(name, SIZES[name])) for name in names}
    batch = MICROBATCHES * SIZE
    return LocatedOrder(Located(shards, move="samples"), batch, MICROBATCHES, seed=3, exact=True)


def train(order: LocatedOrder, world: Any, stop: int, start: int = 0, state: Any = None) -> list[Any]:
    """The samples of each microbatch that this worker has, None of others, with what is known of the step."""
    if state is not None:
        order.load(state)
    order.meet(world, "start")
    found = list[Any]()
    for step in range(start, stop):
        epoch, holders = order.epoch_of(step), order.holders_of(step)
        assert holders is not None and order.microbatches_of(step + 1), "the next batch is loaded, too"
        order._moves = lambda _: ()  # type: ignore[method-assign] # what each worker can read itself
        every = zip(order.microbatches_of(step), order._readers(step), strict=True)
        read = [order.read(epoch, numbers) if world.rank in ranks else None for numbers, ranks in every]
        found.append((epoch, order.is_last(step), order.samples_before(step), read))
        order.read_on(step)
    return found


def united(everyone: list[list[Any]]) -> list[Any]:
    """What all workers read, as one."""
    found = []
    for steps in zip(*everyone, strict=True):
        assert len({step[:3] for step in steps}) == 1
        read = [[one for one in own if one is not None] for own in zip(*(step[3] for step in steps), strict=True)]
        assert all(own and all(one == own[0] for one in own) for own in read), "all that have a stream read the same"
        found.append((*steps[0][:3], [own[0] for own in read]))
    return found


def test_streams_take_turns_until_they_end() -> None:
    (steps,) = threads.run(1, lambda world: train(order_of(), world, 18))
    before, epochs = 0, {0: list[Any](), 1: list[Any]()}
    for epoch, is_last, samples, read in steps:
        assert samples == before and all(len({item[0] for item in one}) == 1 for one in read)
        assert is_last or len(read) == MICROBATCHES
        before += sum(map(len, read))
        epochs.setdefault(epoch, []).append(read)
        assert is_last == (sum(len(one) for step in epochs[epoch] for one in step) == sum(SIZES.values()) + 5 * epoch)
    for epoch in (0, 1):
        taken = dict.fromkeys(SIZES, 0)
        for step in epochs[epoch]:
            for microbatch in step:
                for name, of, number in microbatch:
                    assert (of, number) == (epoch, taken[name]), "each sample once, in the order of its stream"
                    taken[name] += 1
            left = [-(-taken[name] // SIZE) for name in SIZES if taken[name] < SIZES[name] + epoch]
            assert not left or max(left) - min(left) <= 1, "all that go on have given as many microbatches"
        assert taken == {name: size + epoch for name, size in SIZES.items()}


@pytest.mark.parametrize("held", [["abc", "cde"], ["ae", "", "bcd"], ["abcde", "abcde", "d"]])
@pytest.mark.parametrize("kind", [Rows, Stateful])
def test_workers_have_one_order_and_go_on_where_others_were(held: list[str], kind: type[Rows]) -> None:
    (whole,) = threads.run(1, lambda world: train(order_of(), world, 18))
    orders = [order_of(names, kind) for names in held]
    assert united(threads.run(len(held), lambda world: train(orders[world.rank], world, 7))) == whole[:7]
    state = orders[0].state(7)
    resumed = [order_of(names, kind) for names in reversed(held)]
    again = threads.run(len(held), lambda world: train(resumed[world.rank], world, 18, 7, state))
    assert united(again) == whole[7:]
    assert resumed[0].state(18)["readings"].keys() == SIZES.keys()


@pytest.mark.parametrize("step", range(3, 16))  # 3 steps are an epoch, and workers tell each other in few of them
def test_a_state_from_any_step_leads_to_the_same_samples(step: int) -> None:
    (whole,) = threads.run(1, lambda world: train(order_of("bd", Evolving), world, 18))
    first = order_of("bd", Evolving)
    threads.run(1, lambda world: train(first, world, step))
    again = threads.run(1, lambda world: train(order_of("bd", Evolving), world, 18, step, first.state(step)))
    assert again == [whole[step:]]


@pytest.mark.parametrize("sendable", [True, False])
def test_a_state_spares_reading_what_was_before(sendable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stateful, "sendable", sendable)
    first, stream = order_of("b", b=Stateful("b", 900)), Stateful("b", 900)
    threads.run(1, lambda world: train(first, world, 25))
    threads.run(1, lambda world: train(order_of("b", b=stream), world, 26, 25, first.state(25)))
    assert (stream.read < 25 * MICROBATCHES * SIZE) == sendable, stream.read


def test_a_stream_without_end_is_read_step_by_step() -> None:
    orders = [order_of("ab", a=Rows("a", None)), order_of("b")]
    assert threads.run(2, lambda world: len(train(orders[world.rank], world, 60))) == [60, 60]
    assert len(orders[0].streams["a"]._stream._batches) <= 12 * MICROBATCHES + 1, "what was used is dropped"


@pytest.mark.parametrize(
    ("shard", "error", "text"),
    [
        (Rows("b", 63), DisagreementError, "'b' is not the same on rank 0 and rank 1: 61 samples in epoch 0 and 63 "),
        (Rows("b", None), DisagreementError, "61 samples in epoch 0 and more than "),
        (Rows("c", 61), DisagreementError, "'b' is not the same on rank 0 .* other values"),
        (Once("b", 61), DisagreementError, "62 samples in epoch 1 and no samples in epoch 1"),
    ],
)
def test_streams_that_differ_between_workers_are_refused(shard: Rows, error: type[Exception], text: str) -> None:
    def meet(world: Any) -> None:
        order = order_of("ab", **({"b": shard} if world.rank else {}))
        with pytest.raises(error, match=text):
            train(order, world, 30)

    threads.run(2, meet)


def test_a_stream_that_is_used_up_is_an_error_once_training_needs_it() -> None:
    order = order_of("ac", a=Once("a", 12))
    epoch = 3  # steps: 12 + 40 samples in microbatches of 3
    assert threads.run(1, lambda world: [step[1] for step in train(order, world, epoch - 1)]) == [[False, False]]
    assert order.is_last(epoch - 1)
    with pytest.raises(InputError, match="Shard 'a' gives no samples in epoch 1"):
        order.microbatches_of(epoch)
    renewed, state = order_of("ac"), order.state(epoch)
    assert threads.run(1, lambda world: [step[1] for step in train(renewed, world, epoch + 1, epoch, state)]) == [
        [False]
    ]


def test_all_steps_before_that_are_given_if_data_are_loaded_ahead() -> None:
    def give(world: Any) -> int:
        order, given = order_of("a", a=Once("a", 300)), 0
        order.meet(world, "start")
        feed = Feed(order._data, order, torch.device("meta"))  # to which batches are copied ahead, as to a GPU

        def groups_of(step: int) -> list[range]:
            return [range(len(order.microbatches_of(step)))]

        for _ in feed.steps(0, UNKNOWN, groups_of):
            order.read_on(given)
            given += 1
        with pytest.raises(InputError, match="Shard 'a' gives no samples in epoch 1"):
            next(feed.steps(given, UNKNOWN, groups_of))
        return given

    assert threads.run(1, give) == [13]


def test_a_stream_that_is_shorter_after_a_resume_is_an_error() -> None:
    (state,) = threads.run(1, lambda world: [order := order_of("b"), train(order, world, 2)][0].state(2))
    with pytest.raises(InputError, match=r"'b' gives \d samples from sample \d+ of epoch 0"):
        threads.run(1, lambda world: train(order_of("b", b=Rows("b", 52)), world, 3, 2, state))


def test_batches_may_be_left_out_as_far_as_they_are_known() -> None:
    def meet(world: Any) -> None:
        order = order_of("b")
        order.meet(world, "start")
        for step in range(2):
            assert order.microbatches_of(step)
        with pytest.raises(ConfigError, match=r"at most \d batches in a row can be left out"):
            order.microbatches_of(order.known)

    threads.run(1, meet)
