"""Rows of tables at asynchronous servers over threads: only those of a step are sent, and each counts once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_asynchronous_steps import STEPS, Worker
from torch import nn

import paceline
from paceline.comm.servers import network_claims
from paceline.errors import ConfigError, InputError
from paceline.step.optimizer import OptimizerStep, Scaling
from paceline.strategies.parameter_server.async_steps import Gradients
from paceline.strategies.parameter_server.network_server import NetworkServer

ROWS, WIDTH = 11, 2
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


class Model(nn.Module):
    """A model whose gradients do not depend on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.blocks = paceline.SparseEmbedding(ROWS, WIDTH, block=4)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        for parameter in self.parameters():
            parameter.data.fill_(1.0)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.bag(words).sum() + self.blocks(indices=words + 1).sum() + self.bias.sum()
        return out


def words_of(step: int) -> torch.Tensor:
    return torch.tensor([[step % 5, step % 3, step % 3, 7]])


def fill(model: nn.Module, step: int) -> None:
    model.zero_grad()
    for _ in range(2):  # microbatches
        model(words_of(step)).backward()


def update_of(model: nn.Module) -> OptimizerStep:
    return OptimizerStep(model, partial(torch.optim.Adagrad, lr=0.5), None, 0.7, Scaling())


class TableWorker(Worker):
    """A worker that keeps account of the rows that it asks for, and of the bytes that it stages."""

    make, update_of, fill = staticmethod(Model), staticmethod(update_of), staticmethod(fill)

    def __init__(self, world: Any, handlers: dict[Any, Any], **server: Any) -> None:
        super().__init__(world, handlers, **server)
        self.asked, self.staged = list[dict[int, int]](), 0
        for rank in range(world.size):
            self._watch(self.peers.client(rank))

    def _watch(self, client: Any) -> None:
        start = client.start

        def counted(what: str, words: Any, parts: Any = ()) -> None:
            if what == "shard.rows":
                self.asked.append(words[1])
            self.staged += sum(map(len, parts)) if what == "shard.stage" else 0
            start(what, words, parts)

        client.start = counted


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[TableWorker]]:
    monkeypatch.setattr(network_claims, "_SLICE_SECONDS", 0.001)
    monkeypatch.setattr("paceline.strategies.parameter_server.network_server.copies_of", lambda context: 2)
    return TableWorker.start


@pytest.mark.parametrize("server", [{}, {"mode": "bounded", "staleness": 0, "count": 3}, {"dedicated": True}], ids=str)
def test_each_step_changes_its_rows_once(train: Any, server: dict[str, Any]) -> None:
    def act(worker: TableWorker) -> None:
        for first, stop in ((0, 5), (5, STEPS)):
            worker.train(first, stop)
            worker.steps.synchronize(stop)

    workers = train(3, act, **server)
    expected = TableWorker.replayed([worker.made() for worker in workers])
    for worker in workers:
        steps = len(worker.batch.computed)
        assert worker.weights() == expected
        assert not worker.model.bag._forward_pre_hooks and not worker.model.blocks._forward_pre_hooks
        assert sum(sum(one.values()) for one in worker.asked) == sum(
            2 * len(words_of(step).unique()) for step in worker.batch.computed
        ), "each row is pulled once in a step, though two microbatches use it"
        assert (
            worker.staged
            == sum(2 * len(words_of(step).unique()) * (4 + 4 * WIDTH) for step in worker.batch.computed)
            + steps * 4 * WIDTH
        )


def test_a_pull_gets_the_newest_rows(train: Any) -> None:
    """And leaves the others as they are."""
    trained, found, barrier = list[Any](), list[Any](), threading.Barrier(2, timeout=20)

    def act(worker: TableWorker) -> None:
        rank = worker.context.world.rank
        worker.steps._start(0)
        if rank == 1:
            worker.train(0, 4)
            trained.append(worker.made())
        barrier.wait()
        if rank == 0:
            worker.server.pull(4)
            worker.model(torch.tensor([[0, 7]]))
            found.append(worker.model.bag.weight[[0, 7, 1]].detach().clone())
            with pytest.raises(InputError, match=f"The index {ROWS} is not in a table"):
                worker.model(torch.tensor([[ROWS - 1]]))
            found.append(worker.asked)
        barrier.wait()
        worker.steps._synchronized = True

    train(2, act)
    expected = torch.tensor(TableWorker.replayed(trained)[1]).view(ROWS, WIDTH)
    assert torch.equal(found[0][:2], expected[[0, 7]])
    assert found[0][2].tolist() == [1.0] * WIDTH != expected[1].tolist()
    assert found[1] == [{1: 2}, {2: 1, 4: 1}, {1: 1}], "rows 0 and 7 of one table, 1 and 8 of blocks; then row 10"


def test_rows_that_were_not_pulled_are_refused(train: Any) -> None:
    errors: list[str] = []

    def act(worker: TableWorker) -> None:
        def hashed(model: Any, step: int) -> None:
            model.bag.forward(torch.tensor([[1]])).sum().backward()

        worker.batch.fill = hashed
        with pytest.raises(InputError) as caught:
            worker.train(0, 1)
        errors.append(str(caught.value))

    train(1, act)
    assert "'bag.weight' has gradients for rows that are not among the indices" in errors[0]


def test_a_compiled_model_is_refused(train: Any) -> None:
    def act(worker: TableWorker) -> None:
        worker.context.settings = worker.context.settings.model_copy(update={"compile": True})
        with pytest.raises(ConfigError, match="hooks, which a compiled model may not call: use compile = false"):
            NetworkServer(worker.shared)

    train(1, act)


def test_a_killed_worker_loses_no_rows(train: Any) -> None:
    """Rank 2 is lost with a server; its last step is staged everywhere and has no number yet."""
    barrier = threading.Barrier(3, timeout=20)

    def act(worker: TableWorker) -> None:
        worker.train(0, 4)
        barrier.wait()
        worker.steps._drain(4)
        barrier.wait()
        if worker.context.world.rank == 2:
            worker.server.pull(9)
            parts, buffers = worker.batch.gradients(9, [])
            worker.server._stage(Gradients(9, parts, buffers), torch.tensor(1.0))
        barrier.wait()
        if worker.context.world.rank == 2:
            return
        worker.peers.lost.add(2)
        worker.context.world.is_missing = lambda rank: rank == 2
        assert worker.steps.close() is None

    workers = train(3, act, count=3)
    expected = TableWorker.replayed([worker.made() for worker in workers])
    assert workers[0].weights() == workers[1].weights() == expected
