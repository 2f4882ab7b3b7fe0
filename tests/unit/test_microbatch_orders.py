"""How a batch is cut into microbatches: by functions of Paceline, and of the user."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.data.order import BatchOrder, Order
from paceline.data.sampler import order_by
from paceline.data.streams.order import StreamOrder
from paceline.schedule.microbatch_orders import MicrobatchOrder

LENGTHS = torch.randint(1, 60, (70,), generator=torch.Generator().manual_seed(1))
ORDERS = {
    "in turn": paceline.in_turn,
    "by length": paceline.by_length(LENGTHS),
    "by tokens": paceline.by_tokens(LENGTHS.tolist()),
    "by class": paceline.by_class(lambda sample: f"class {sample % 5}"),
}


def batched(seed: int, epoch: int) -> list[list[int]]:
    return [[*range(20)][::-1], [3, 3, 3, 50], [69], [*range(30, 54)]]


def orders(function: MicrobatchOrder) -> list[BatchOrder]:
    made: list[BatchOrder] = [
        Order(70, 24, 8, 0),
        order_by(lambda seed, epoch: torch.randperm(70), 70, 24, 7, 0, drop_last=True),
        order_by(batched, 70, 24, 8, 0, drop_last=False),
        StreamOrder([*range(70)], 24, 8, 0, drop_last=False),
    ]
    for one in made:
        one.cut_by(function)
    return made


@pytest.mark.parametrize("name", ORDERS)
def test_each_sample_is_in_one_microbatch(name: str) -> None:
    for order, again in zip(orders(ORDERS[name]), orders(ORDERS[name]), strict=True):
        for step in range(6):
            found = order.microbatches_of(step)
            assert sorted(chain(*found)) == sorted(order.numbers_of(step))
            assert 0 < len(found) <= len(order.slices_of(step)) and all(found)
            assert [len(part) for part in order.parts_of(step)] == [len(one) for one in found]
            assert order.parts_of(step)[-1].stop == order.samples_of(step)
            assert len(found) in order.cuts()
            assert found == again.microbatches_of(step)


def test_what_the_orders_promise() -> None:
    batch = [int(sample) for sample in torch.randperm(70, generator=torch.Generator().manual_seed(2))[:40]]
    tokens = [sum(int(LENGTHS[one]) for one in part) for part in ORDERS["by tokens"](batch, 8)]
    assert max(tokens) - min(tokens) <= int(LENGTHS.max()) and sum(tokens) == int(LENGTHS[batch].sum())
    assert max(tokens) < 1.04 * sum(tokens) / 8
    assert [len(part) for part in paceline.by_tokens([0.0] * 70)(batch, 8)] == [5] * 8
    alike = [[int(LENGTHS[one]) for one in part] for part in ORDERS["by length"](batch, 8)]
    assert [len(part) for part in alike] == [5] * 8 and [*chain(*alike)] == sorted(LENGTHS[batch].tolist())
    for count, kinds in ((8, 5), (3, 3)):
        grouped = [{one % 5 for one in part} for part in ORDERS["by class"](batch, count)]
        assert len(grouped) == kinds and sum(map(len, grouped)) == 5
    assert [len(part) for part in paceline.by_class([0] * 6 + [1] * 2 + [2] * 3)([*range(11)], 2)] == [6, 5]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("in turn", ["microbatch_order is 'in turn', a str", "paceline.in_turn"]),
        (paceline.by_length, ["cannot be called", "paceline.by_length(lengths)"]),
        (lambda samples, count: None, ["returned None"]),
        (lambda samples, count: [samples[:2], samples[3:]], ["gave 23 samples in 2 microbatches for a batch of 24"]),
        (lambda samples, count: [[*range(len(samples))]], ["not the number of each sample of the batch once"]),
        (lambda samples, count: [[one] for one in samples], ["of 1, 1, 1", "at most 8 microbatches"]),
        (lambda samples, count: [samples, []], ["of 24, 0 samples", "none of them empty"]),
        (
            lambda samples, count: [[samples[at] for at in torch.randperm(len(samples))]],
            ["gives different microbatches", "draw random numbers"],
        ),
        (
            lambda samples, count, calls=[0]: [samples[calls.append(0) or len(calls) :] + samples[: len(calls)]],
            ["again"],
        ),
        (paceline.by_length([1] * 50), ["by_length got a list of 50, without a value for sample"]),
        (paceline.by_tokens([-1.0] * 70), ["by_tokens got the length -1.0 for sample"]),
        (paceline.by_class({}), ["by_class got a dict of 0"]),
    ],
)
def test_what_is_no_microbatch_order(function: Any, words: list[str]) -> None:
    with pytest.raises(paceline.InputError) as caught:
        Order(70, 24, 8, 0).cut_by(function)
    assert all(word in str(caught.value) for word in words), caught.value


def start(data: TensorDataset, **more: Any) -> paceline.Session:
    torch.manual_seed(0)
    return paceline.start(
        **{
            "model": nn.Linear(3, 2),
            "optimizer": partial(torch.optim.SGD, lr=1.0),
            "loss": nn.functional.mse_loss,
            "data": data,
            "batch": 24,
            **more,
        }
    )


def test_the_mean_is_over_the_samples_of_the_batch() -> None:
    data = TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    loss = nn.functional.mse_loss(plain(data.tensors[0]), data.tensors[1])
    loss.backward()
    weight, gradient = plain.weight.detach(), plain.weight.grad
    assert gradient is not None
    for order in ORDERS.values():
        session = start(data, microbatch_order=order)
        (batch,) = session.batches(steps=1)
        report = session.step(batch)
        assert report.loss == pytest.approx(loss.item())
        torch.testing.assert_close(session.model_state()["weight"], weight - gradient)


def test_a_resume_needs_the_same_order(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(70, 3), torch.randn(70, 2))

    def steps(count: int, lengths: list[float], folder: str = "saved", **more: Any) -> str:
        saved = {"directory": tmp_path / folder, "every": 2}
        session = start(data, checkpoint=saved, microbatch_order=paceline.by_tokens(lengths), exact=True, **more)
        for batch in session.batches(steps=count):
            session.step(batch)
        return session.fingerprint()

    lengths = [float(one) for one in LENGTHS]
    steps(2, lengths)
    assert steps(5, lengths, resume="auto") == steps(5, lengths, "other")
    with pytest.raises(paceline.CheckpointError, match="another order of samples: microbatch_order was"):
        steps(5, lengths[::-1], resume="auto")
    with pytest.raises(paceline.CheckpointError, match=r"another order of samples: microbatch_order was .* None"):
        start(data, checkpoint={"directory": tmp_path / "saved"}, resume="auto")


def test_what_does_not_go_together() -> None:
    data = TensorDataset(torch.randn(48, 3), torch.randn(48, 2))
    with pytest.raises(paceline.ConfigError, match=r"leave out microbatch_order, or set backup.workers = 0"):
        start(data, strategy="backup", backup={"workers": 1}, microbatch_order=paceline.in_turn)
    with pytest.raises(paceline.InputError, match=r"the state of the same rows .* leave out microbatch_order"):
        start(data, loss=None, forward=lambda model, data, state: (0, state), microbatch_order=paceline.in_turn)
