"""What a metric or a model draws in an evaluation depends on the chunk, not on the worker that computes it."""

from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional

import paceline
from paceline.evaluation import measure
from paceline.evaluation.chunks import Chunks


class Drawing:
    """A quantity that draws from two of the global generators."""

    def compute(self, model: nn.Module, data: Any, samples: int) -> Any:
        return float(torch.rand(())), float(numpy.random.random_sample())

    def combine(self, contributions: list[Any]) -> Any:
        return contributions


def test_the_draws_of_a_chunk_are_the_same_on_any_worker() -> None:
    data = [(torch.ones(4), 0)] * 40
    session = paceline.start(
        model=nn.Linear(4, 2),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=functional.cross_entropy,
        data=data,
        batch=8,
    )

    def found(steps: int, size: int) -> dict[int, Any]:
        context, drawn = session._context, []
        for rank in range(size):
            torch.rand(rank)
            drawn += measure._computed(context, steps, Drawing(), Chunks(context, data, "evaluate"), rank, size, "")
        return dict(drawn)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = found(3, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(one.values())) == len(one) > 2
    assert found(3, 2) == found(3, 3) == one != found(4, 1)
