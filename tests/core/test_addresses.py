"""Gradients begin at a cache line on any number of workers: a matrix product may round differently elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.testing.ranks import Ended

SCRIPT = """
import torch
from torch import nn
import paceline
from torch.utils.data import TensorDataset

class Joined(nn.Module):
    # the gradients of its parameters are parts of one tensor
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([torch.ones(3), torch.ones(5), torch.ones(9)])
    def forward(self, values):
        return values * torch.cat(tuple(self.parts)).sum()

class Watching(torch.optim.SGD):
    def step(self, closure=None):
        for value in self.param_groups[0]["params"]:
            assert value.grad.data_ptr() % 64 == 0
        return super().step(closure)

session = paceline.start(
    model=Joined(), optimizer=Watching, loss=nn.functional.mse_loss, batch=8, exact=True, strategy=STRATEGY,
    data=TensorDataset(torch.ones(16, 1), torch.ones(16, 1)),
)
for batch in session.batches(steps=2):
    session.step(batch)
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("workers", "one_machine", "strategy"),
    [(1, True, "allreduce"), (2, True, "allreduce"), (2, False, "allreduce"), (2, True, "parameter-server")],
)
def test_gradients_are_aligned(
    ranks: Callable[..., list[Ended]], tmp_path: Path, workers: int, one_machine: bool, strategy: str
) -> None:
    script = SCRIPT.replace("STRATEGY", repr(strategy))
    for one in ranks(script, workers, tmp_path, one_machine=one_machine, deadline=60):
        assert (one.code, one.out.strip()) == (0, "done"), one.err
