"""Without ``exact`` a run differs from one process by rounding only; large passes are used where they are the same."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

TRAINED = """
import torch
from functools import partial
from torch import nn
from torch.nn import functional
import paceline
from paceline.data.order import Order
from subjects import tell

def data():
    random = torch.Generator().manual_seed(5)
    return torch.utils.data.TensorDataset(
        torch.randn(203, 12, generator=random, dtype=torch.float64), torch.randint(4, (203,), generator=random)
    )

def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4)).double()

def noisy():
    torch.manual_seed(0)
    layers = [nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4)]
    return nn.Sequential(*layers).double()

def contrastive(output, target):
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))

optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

def trained(model, loss, **settings):
    session = paceline.start(model=model, optimizer=optimizer, loss=loss, data=data(), batch=50, **settings)
    report = None
    groups = []
    for batch in session.batches(steps=50):
        report = session.step(batch)
        groups.append(len(batch.groups))
    return {"loss": report.loss, "groups": groups[5:8], "norm": report.gradient_norm}

def plain(model, loss):
    order, every = Order(203, 50, 8, seed=0), data()
    steps = optimizer(model.parameters())
    for step in range(50):
        samples = [sample for part in order.microbatches_of(step) for sample in part]
        features, target = every[samples]
        steps.zero_grad()
        value = loss(model(features), target)
        value.backward()
        steps.step()
    return {"loss": value.item()}

tell(
    plain=plain(perceptron(), functional.cross_entropy),
    perceptron=trained(perceptron(), functional.cross_entropy),
    apart=trained(perceptron(), functional.cross_entropy, microbatches=8),
    noisy=trained(noisy(), functional.cross_entropy),
    contrastive=trained(perceptron(), contrastive),
)
"""


@pytest.fixture(scope="module")
def results(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What each of so many workers found; each number of workers is run once."""
    return functools.cache(lambda workers: printed(TRAINED, workers, tmp_path_factory.mktemp("fast")))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3, 2, 5])
def test_the_loss_is_that_of_one_process_up_to_rounding(results: Any, workers: int) -> None:
    for one in results(workers):
        for model in ("perceptron", "apart", "noisy", "contrastive"):
            assert one[model]["loss"] == pytest.approx(results(1)[0][model]["loss"], rel=1e-9, abs=0), model
            assert one[model]["norm"] == pytest.approx(results(1)[0][model]["norm"], rel=1e-7, abs=0), model
        assert one["perceptron"]["loss"] == pytest.approx(one["plain"]["loss"], rel=1e-9, abs=0), "of plain PyTorch"


@pytest.mark.slow
def test_microbatches_are_joined_only_where_it_makes_no_difference(results: Any) -> None:
    for rank, share in enumerate((3, 3, 2)):
        found = results(3)[rank]
        assert found["perceptron"]["groups"] == [1, 1, 1]
        assert found["apart"]["groups"] == [share] * 3
        assert found["noisy"]["groups"] == [share] * 3
        assert found["contrastive"]["groups"] == [share] * 3
