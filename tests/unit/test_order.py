"""Which samples make up which batch."""

import pytest

from paceline.data.order import Order


def samples(order: Order, step: int) -> list[int]:
    return [sample for part in order.microbatches_of(step) for sample in part]


@pytest.mark.parametrize(("length", "batch", "parts"), [(203, 50, 8), (64, 64, 8), (10, 4, 3), (7, 7, 1)])
def test_each_epoch_has_every_sample_once(length: int, batch: int, parts: int) -> None:
    order = Order(length, batch, parts, seed=1)
    for epoch in range(3):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        assert sorted(sample for step in steps for sample in samples(order, step)) == list(range(length))
        assert {order.epoch_of(step) for step in steps} == {epoch}
        assert [len(samples(order, step)) for step in steps] == [order.samples_of(step) for step in steps]


def test_drop_last_leaves_the_short_batch_out() -> None:
    order = Order(203, 50, 8, seed=1, drop_last=True)
    assert order.steps_per_epoch == 4
    seen = [sample for step in range(4) for sample in samples(order, step)]
    assert len(seen) == len(set(seen)) == 200


@pytest.mark.parametrize("drop_last", [False, True])
def test_samples_before_a_step_add_up(drop_last: bool) -> None:
    order = Order(203, 50, 8, seed=1, drop_last=drop_last)
    for step in range(20):
        assert order.samples_before(step) == sum(order.samples_of(earlier) for earlier in range(step))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    order, other = Order(203, 50, 8, seed=1), Order(203, 50, 8, seed=2)
    assert samples(order, 0) == samples(Order(203, 50, 8, seed=1), 0)
    assert samples(order, 0) != samples(order, order.steps_per_epoch)
    assert samples(order, 0) != samples(other, 0)


def test_microbatches_do_not_move_samples_between_batches() -> None:
    few, many = Order(203, 50, 2, seed=1), Order(203, 50, 8, seed=1)
    assert [samples(few, step) for step in range(5)] == [samples(many, step) for step in range(5)]
