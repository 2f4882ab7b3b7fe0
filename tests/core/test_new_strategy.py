"""A strategy from outside, written by following CONTRIBUTING: one file that touches the registry alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from fork_server import forked
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import paceline
from paceline.data.feed import MicrobatchGroup
from paceline.data.order import Order
from paceline.schedule.shares import even
from paceline.schedule.tree import Node
from paceline.settings import Settings
from paceline.step.commit import commit
from paceline.step.context import StepResult, TrainingContext
from paceline.step.gradients.accumulate import Accumulator
from paceline.strategies.base import Capabilities, Strategy
from paceline.strategies.data_parallel.reducer import Reducer
from paceline.strategies.data_parallel.results import Results
from paceline.strategies.registry import Entry, register
from paceline.testing import Worker, processes


class EverySecond(Strategy):
    """All-reduce every second worker's share.

    ::

        worker 0   F0 B0 F1 B1 ┐
        worker 1               ┼ reduce ─ update      the samples of worker 1 are left out
        worker 2   F3 B3       ┘
    """

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._reducer = Reducer(context, overlap=False)
        self._results = Results(context, most=context.order.microbatches)
        context.warnings.append("every second worker's samples are left out")

    def _layout(self, step: int) -> list[list[range]]:
        shares = even(len(self._context.order.parts_of(step)), self._context.world.size)
        return [[] if rank % 2 else [range(one, one + 1) for one in share] for rank, share in enumerate(shares)]

    def groups(self, step: int) -> list[range]:
        return self._layout(step)[self._context.world.rank]

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        context, layout = self._context, self._layout(step)
        gradients, statistics, pairs = Accumulator(exact=False), Accumulator(exact=False), []
        self._reducer.clear()
        context.compute.buffers.begin()
        for group in groups:
            computed = context.compute.forward_pass(group, step)
            computed.total.backward()
            gradients.push(group.microbatches.start, self._reducer.take())
            statistics.push(group.microbatches.start, [*computed.buffers])
            pairs.append(computed.pair)
        header = self._results.send(step, [group.start for group in layout[context.world.rank]], pairs, missing=False)
        nodes = [[Node(0, rank)] if own else [] for rank, own in enumerate(layout)]
        self._reducer.send(nodes, [values for _, values in gradients.nodes()], header.count)
        self._reducer.finish()
        parts = self._results.parts(layout, header, None)
        sums = [values for _, values in statistics.nodes()]
        means = self._reducer.statistics(nodes, sums, sum(part.counted for part in parts))
        return commit(context, step, groups, parts, means, header.notice)

    def close(self) -> None:
        self._reducer.close()


def capabilities(settings: Settings, workers: int) -> Capabilities:
    return Capabilities(exact=False, exact_with="another strategy")


SAMPLES, BATCH, MICROBATCHES, SEED, RATE, STEPS, WORKERS = 60, 24, 8, 5, 0.1, 5, 3


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(features, features.sum(1, keepdim=True).tanh())


def pipedream_reference(ranks: list[int]) -> torch.Tensor:
    """The weights after gradient descent in one process on the shares of some ranks of each batch."""
    features, targets = data().tensors
    order = Order(SAMPLES, BATCH, MICROBATCHES, SEED, False)
    weights = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    for step in range(STEPS):
        shares = even(len(order.parts_of(step)), WORKERS)
        microbatches = order.microbatches_of(step)
        samples = [sample for rank in ranks for one in shares[rank] for sample in microbatches[one]]
        (gradient,) = torch.autograd.grad(mse_loss(features[samples] @ weights.T, targets[samples]), weights)
        weights = (weights - RATE * gradient).detach().requires_grad_()
    return weights.detach()


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
@processes(WORKERS, deadline=180, start=forked)
def test_every_second_workers_share(worker: Worker) -> None:
    register("every-second", Entry(EverySecond, capabilities=capabilities))
    model = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    session = paceline.start(
        model=model,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        loss=mse_loss,
        data=data(),
        batch=BATCH,
        microbatches=MICROBATCHES,
        seed=SEED,
        drop_last=False,
        strategy="every-second",
    )
    reports = [session.step(batch) for batch in session.batches(steps=STEPS)]
    torch.testing.assert_close(model.weight.detach(), pipedream_reference([0, 2]), rtol=1e-12, atol=0.0)
    assert not torch.allclose(pipedream_reference([0, 2]), pipedream_reference([0, 1, 2]), rtol=1e-3)  # of all-reduce
    assert "every second worker's samples are left out" in reports[-1].notes
