"""The order of a sampler: epochs of several lengths, positions, and what is no sampler."""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, WeightedRandomSampler

from paceline.data.sampler import BatchedOrder, SampledOrder, order_by
from paceline.errors import ConfigError, InputError


def order_of(sampler: Any, **changes: Any) -> SampledOrder:
    given = {"length": 20, "batch": 4, "microbatches": 2, "seed": 3, "drop_last": False} | changes
    return SampledOrder(sampler, **given)


def curriculum(seed: int, epoch: int) -> list[int]:
    """Epoch e has the first 6 + 3e samples, backwards."""
    return [*range(6 + 3 * epoch)][::-1]


def batch(order: SampledOrder, step: int) -> list[int]:
    return [sample for part in order.microbatches_of(step) for sample in part]


def test_epochs_of_several_lengths() -> None:
    order = order_of(curriculum)
    assert [batch(order, step) for step in range(6)] == [
        *[[5, 4, 3, 2], [1, 0]],
        *[[8, 7, 6, 5], [4, 3, 2, 1], [0]],
        [11, 10, 9, 8],
    ]
    assert [order.epoch_of(step) for step in range(6)] == [0, 0, 1, 1, 1, 2]
    assert [order.is_last(step) for step in range(6)] == [False, True, False, False, True, False]
    assert [order.samples_before(step) for step in range(6)] == [0, 4, 6, 10, 14, 15]
    assert (order.end_of(2, 0), order.end_of(1, 3), order.steps_at(5)) == (5, 5, 3)
    again = order_of(curriculum)
    again.load(order.state(5))
    assert (again.first_of(2), batch(again, 5)) == (5, [11, 10, 9, 8])
    ahead = order_of(curriculum)
    assert (ahead.first_of(4), batch(ahead, 0), batch(ahead, 5)) == (12, [5, 4, 3, 2], [11, 10, 9, 8])
    dropped = order_of(curriculum, drop_last=True)
    assert [batch(dropped, step) for step in range(3)] == [[5, 4, 3, 2], [8, 7, 6, 5], [4, 3, 2, 1]]


def test_draws_are_keyed() -> None:
    weights = torch.arange(20.0)
    kinds: list[Any] = [
        lambda seed, epoch: torch.multinomial(weights, 12, replacement=True),
        lambda seed, epoch: torch.randperm(20, generator=torch.Generator().manual_seed(seed + epoch)).numpy(),
        WeightedRandomSampler(weights.tolist(), 12),
        lambda seed, epoch: WeightedRandomSampler(weights.tolist(), 12),
    ]
    for kind in kinds:
        before = torch.random.get_rng_state()
        order = order_of(kind)
        first, second = batch(order, 0), batch(order, order.first_of(1))
        assert torch.equal(before, torch.random.get_rng_state())
        torch.rand(5)
        other = order_of(kind)
        assert batch(other, other.first_of(1)) == second != first == batch(other, 0)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ([3, 1, 2], ["list", "pure function of (seed, epoch)"]),
        (lambda seed, epoch: [1, 20], ["number 20", "0 to 19"]),
        (lambda seed, epoch: [], ["0 samples"]),
        (lambda seed, epoch: [0.5], ["float"]),
        (lambda seed, epoch: 7, ["int for epoch 0"]),
        (BatchSampler(range(20), 4, False), ["2-dimensional"]),
        (DistributedSampler([*range(20)], 2, 0), ["DistributedSampler", "hands out the shares"]),
        (WeightedRandomSampler([1.0] * 20, 20, generator=torch.Generator()), ["different numbers", "again"]),
    ],
)
@pytest.mark.promise("docs/data.md", "`DistributedSampler` is refused, because Paceline hands out the shares")
def test_what_is_no_sampler(sampler: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        order_of(sampler)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_order_of_an_epoch_that_has_begun_stays() -> None:
    weights, calls = torch.ones(20), list[int]()

    def drawn(seed: int, epoch: int) -> torch.Tensor:
        calls.append(epoch)
        return torch.multinomial(weights, 12, replacement=True)

    order = order_of(drawn)
    assert order.end_of(3, 0) == 9 and [batch(order, step) for step in range(3)] != []
    assert order.state(2) == {"lengths": []}, "the loop has changed nothing"
    order.may_change = lambda: True
    assert order.state(2) == {"lengths": []}, "the sampler gives them again"
    weights[:10] = 0  # in epoch 0
    assert min(batch(order, 3)) >= 10, "epoch 1 is drawn when it begins"
    kept = batch(order, 4)
    weights[:15], weights[16:] = 0, 0  # in epoch 1
    state = order.state(4)
    assert list(state) == ["lengths", "numbers"]
    del calls[:]
    assert (order.state(6), order.samples_before(6), calls) == ({"lengths": [12, 12]}, 24, []), "epoch 2 is not drawn"
    again = order_of(drawn)
    again.load(state)
    assert batch(again, 4) == kept and set(batch(again, 6)) == {15}
    again.load(order.state(6))
    assert set(batch(again, 6)) == {15}


def test_a_length_that_the_loop_changes_is_refused() -> None:
    count = [8]
    order = order_of(lambda seed, epoch: range(count[0]))
    assert order.first_of(2) == 4
    count[0] = 12
    with pytest.raises(InputError, match="gave 8 samples for epoch 1 when its length was asked for, and gives 12 now"):
        batch(order, 2)


def balanced(seed: int, epoch: int) -> list[list[int]]:
    """Batches of one to four samples, in an order that is drawn; epoch 1 has fewer."""
    batches = [[0, 1, 2, 3], [4], [5, 6, 7], [8, 9]][: 4 - epoch % 2]
    return [batches[place] for place in torch.randperm(len(batches)).tolist()]


def test_a_batch_sampler_gives_the_batches() -> None:
    order = order_by(balanced, 20, 4, 2, 3, drop_last=False)
    assert isinstance(order, BatchedOrder)
    batches = [batch(order, step) for step in range(7)]
    assert sorted(batches[:4]) == [[0, 1, 2, 3], [4], [5, 6, 7], [8, 9]] and len(batches[4:]) == 3
    parts = {len(batch(order, step)): [*map(len, order.microbatches_of(step))] for step in range(4)}
    assert parts == {4: [2, 2], 1: [1], 3: [2, 1], 2: [1, 1]}
    assert [order.samples_of(step) for step in range(7)] == [*map(len, batches)]
    assert [order.samples_before(step) for step in range(8)] == [sum(map(len, batches[:step])) for step in range(8)]
    assert [order.is_last(step) for step in range(7)] == [False] * 3 + [True] + [False] * 2 + [True]
    assert (order.steps_at(0), order.steps_at(4), order.end_of(2, 0)) == (4, 3, 7)
    for step in (2, 4, 5, 7, 9):
        again = order_by(balanced, 20, 4, 2, 3, drop_last=False)
        again.load(order.state(step))
        assert batch(again, step) == batch(order, step) and again.samples_before(step) == order.samples_before(step)
    rows = order_by(lambda seed, epoch: torch.arange(12).reshape(3, 4), 20, 4, 2, 3, drop_last=False)
    of_torch = order_by(BatchSampler(range(12), 4, False), 20, 4, 2, 3, drop_last=False)  # type: ignore[arg-type]
    assert [batch(rows, step) for step in range(3)] == [batch(of_torch, step) for step in range(3)]
    assert rows.agreed() == of_torch.agreed() != order.agreed()


@pytest.mark.parametrize(
    ("sampler", "text"),
    [
        (lambda seed, epoch: [[0, 1, 2, 3, 4]], "a batch of 5 samples for epoch 0, and batch = 4 is the most"),
        (lambda seed, epoch: [[0], []], "a batch of 0 samples"),
        (lambda seed, epoch: [[0], 1], "gave int among the batches"),
        (lambda seed, epoch: [[0], ["a"]], "gave list among the batches"),
        (lambda seed, epoch: [[0, 20]], "number 20"),
    ],
)
def test_batches_that_cannot_be_trained_are_refused(sampler: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        order_by(sampler, 20, 4, 2, 3, drop_last=False)
    with pytest.raises(ConfigError, match="drop_last=True has no meaning for a batch sampler"):
        order_by(balanced, 20, 4, 2, 3, drop_last=True)


def test_a_batch_sampler_gives_the_same_sizes_again() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(seed: int, epoch: int) -> list[list[int]]:
        return [[0] * int(torch.randint(1, 5, (), generator=generator)) for _ in range(20)]

    with pytest.raises(InputError, match="batches of other sizes when it was called again"):
        order_by(drawn, 20, 4, 2, 3, drop_last=False)
