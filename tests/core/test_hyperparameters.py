"""Hyper-parameters that the script changes by hand, on any number of workers and through a resume."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline

Printed = Callable[..., list[dict[str, Any]]]

PLATEAU = """
import os
from functools import partial
import torch
import paceline
from subjects import classes, tell

data = classes(48)

def train(epochs, **settings):
    torch.manual_seed(0)
    session = paceline.start(
        model=torch.nn.Linear(12, 4), optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9), exact=True,
        loss=torch.nn.functional.cross_entropy, data=data, batch=16,
        checkpoint={"directory": os.environ["FOLDER"], "every": 5}, **settings,
    )
    kept = session.register(best=0.0)
    rates = []
    for epoch in session.epochs(epochs):
        for batch in session.batches():
            assert len(batch) == 16
            rates.append(session.step(batch).learning_rate)
        value = session.evaluate(data)
        if value > kept.best - 0.5:  # never so much better after the first
            for group in session.optimizer.param_groups:
                group["lr"] /= 4
        kept.best = value
    return [rates, session.fingerprint()]

given = {"strategy": os.environ["STRATEGY"]}
if "RESUME" in os.environ:
    tell(trained=train(4, resume="auto", **given))
else:
    tell(trained=train(int(os.environ["EPOCHS"]), **given))
"""


def test_a_rate_changed_by_hand_is_the_same_everywhere_and_after_a_resume(printed: Printed, tmp_path: Path) -> None:
    def trained(workers: int, strategy: str, epochs: int, **more: str) -> Any:
        folder = tmp_path / f"{workers}-{strategy}-{epochs}"
        said = {"STRATEGY": strategy, "EPOCHS": str(epochs), "FOLDER": str(more.pop("folder", folder)), **more}
        found = printed(PLATEAU, workers, tmp_path, environment=said)
        assert all(one["trained"] == found[0]["trained"] for one in found)
        return found[0]["trained"]

    rates, weights = trained(1, "allreduce", 4)
    assert rates == [rate for rate in (0.5, 0.125, 0.03125, 0.0078125) for _ in range(3)]
    assert trained(2, "stealing", 4) == [rates, weights]
    trained(2, "allreduce", 3)  # its newest checkpoint is of step 5, in the second epoch
    resumed, same = trained(1, "allreduce", 4, RESUME="1", folder=str(tmp_path / "2-allreduce-3"))
    assert (resumed, same) == (rates[-len(resumed) :], weights)
    assert len(resumed) in (7, 8)


@pytest.mark.parametrize("strategy", ["parameter-server", "local-sgd"])
def test_it_is_refused_where_others_make_updates(strategy: str) -> None:
    session = paceline.start(
        model=torch.nn.Linear(2, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=torch.nn.functional.mse_loss,
        data=torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1)),
        batch=4,
        strategy=strategy,
    )
    with pytest.raises(paceline.ConfigError, match=f"with strategy '{strategy}' not every worker makes every update"):
        session.optimizer  # noqa: B018
