"""Embeddings with sparse gradients: what is refused before the first step, tables in blocks, rows in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it, and it sets a variable of the environment
from torch import nn

import paceline
from paceline.errors import InputError
from paceline.schedule.slices import rows
from paceline.settings import Settings
from paceline.step.checks import sparse_parameters
from paceline.step.forward import name_call
from paceline.step.probes.row_probe import probe_rows
from paceline.strategies import registry
from paceline.strategies.sharded.tables import Tables

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


class Rule(torch.optim.Optimizer):
    """SGD that also changes other rows, or looks at them, on the rows that have a gradient."""

    def __init__(self, params: Any, decay: float = 1.0, normed: bool = False, sums: int = 0) -> None:
        super().__init__(params, {"lr": 0.1, "decay": decay, "normed": normed, "sums": sums})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                value.mul_(group["decay"])
                if group["sums"]:
                    self.state[value]["sums"] = torch.zeros(value.shape[group["sums"] - 1])
                scale = value.norm() if group["normed"] else 1.0
                value.sub_(value.grad.coalesce() * (group["lr"] * float(scale)))


def probe(optimizer: Callable[[Any], torch.optim.Optimizer], divides: bool = True) -> dict[str, torch.Size]:
    model = nn.Sequential(nn.Embedding(50, 100, sparse=True), nn.Linear(100, 1))
    context: Any = SimpleNamespace(
        sparse={"0.weight"},
        update=SimpleNamespace(
            optimizer=optimizer(model[0].parameters()), parameters=dict(model.named_parameters()), row_states={}
        ),
        settings=SimpleNamespace(strategy="sharded"),
        divides_update=divides,
    )
    probe_rows(context)
    found: dict[str, torch.Size] = context.update.row_states
    return found


class EagerAdagrad(torch.optim.Adagrad):
    """Make the state in the constructor, as before PyTorch 2.13."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for value in self.param_groups[0]["params"]:
            self.state[value] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(value)}

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> tuple[bool, bool]:
        for value in group["params"]:
            held = value, value.grad, self.state[value]["sum"], self.state[value]["step"]
            for one, entry in zip(lists, held, strict=True):
                one.append(entry)
        return any(one.is_sparse for one in lists[1]), False


REFUSED = {
    "AdamW cannot update the parameter '0.weight', whose gradient is sparse": torch.optim.AdamW,
    "keeps a sparse 'momentum_buffer'": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "weight_decay option is not compatible with sparse gradients. Use torch's": partial(
        torch.optim.Adagrad, weight_decay=0.1
    ),
    "SGD cannot update": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "changes rows without a gradient of the parameter '0.weight'": partial(Rule, decay=0.9),
    "looks at several rows to update one row": partial(Rule, normed=True),
    "keeps a 'sums' of another shape than that of the parameter": partial(Rule, sums=2),
}


@pytest.mark.parametrize("words", REFUSED)
def test_an_optimizer_that_cannot_train_a_table_is_refused(words: str) -> None:
    with pytest.raises(InputError, match=words):
        probe(REFUSED[words])


@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.SGD, lr=0.1), torch.optim.Adagrad, EagerAdagrad, torch.optim.SparseAdam, Rule],
)
def test_others_are_taken(optimizer: Any) -> None:
    assert not probe(optimizer)
    assert not probe(partial(Rule, normed=True), divides=False)


def test_a_state_with_a_value_for_each_row_is_known() -> None:
    assert probe(partial(Rule, sums=1)) == {"optimizer/0.weight/sums": (50,)}


@pytest.mark.parametrize(
    ("table", "option"),
    [
        (nn.Embedding(9, 2, sparse=True, scale_grad_by_freq=True), "scale_grad_by_freq=True"),
        (nn.EmbeddingBag(9, 2, sparse=True, mode="max"), "mode='max'"),
    ],
)
def test_options_without_sparse_gradients_are_refused(table: nn.Module, option: str) -> None:
    with pytest.raises(InputError, match=f"'0' has {option}, for which torch computes no sparse gradients"):
        sparse_parameters(nn.Sequential(table), "any")


@pytest.mark.parametrize("table", [nn.Embedding(9, 2), nn.EmbeddingBag(9, 2, sparse=True)])
def test_an_index_that_is_not_in_the_table_is_named(table: nn.Module) -> None:
    with pytest.raises((IndexError, RuntimeError)) as caught:
        table(torch.tensor([[1, 9]]))
    name_call(caught.value, range(3, 4), 1, 5)
    assert "microbatch 3 (1 sample) of step 5. The index 9 is not in an embedding of 9 rows (0 to 8)" in (
        str(caught.value) + " ".join(getattr(caught.value, "__notes__", ()))
    )


def test_a_table_in_blocks_has_the_values_and_gradients_of_one_embedding() -> None:
    torch.manual_seed(0)
    table, whole = paceline.SparseEmbedding(10, 3, block=4), nn.Embedding(10, 3)
    with torch.no_grad():
        whole.weight.copy_(torch.cat([*table.blocks]))
    indices = torch.tensor([[8, 1], [1, 9]])
    weights = torch.randn(2, 2, 3)
    for one in (table, whole):
        rows = one(indices)
        (rows * weights).sum().backward()
        assert torch.equal(rows, whole(indices))
    gradients = [block.grad for block in table.blocks]
    assert [one.coalesce().indices().tolist() for one in gradients if one is not None] == [[[1]], [[]], [[0, 1]]]
    assert torch.equal(torch.cat([one.to_dense() for one in gradients if one is not None]), whole.weight.grad)


@pytest.mark.parametrize("index", [-1, 10])
def test_an_index_that_is_not_in_a_table_in_blocks_is_refused(index: int) -> None:
    with pytest.raises(InputError, match=f"The index {index} is not in a table of 10 rows"):
        paceline.SparseEmbedding(10, 3, block=4)(torch.tensor([2, index]))
    with pytest.raises(InputError, match=r"SparseEmbedding\(rows=0\) needs at least 1"):
        paceline.SparseEmbedding(0, 3)


def test_the_norm_of_a_table_is_that_of_its_rows_in_order() -> None:
    """Another order rounds it differently. The second worker's rows come after the two of the first one."""
    world: Any = SimpleNamespace(rank=1, size=2, shared_memory=None, gather=lambda own, _: [{0: 2}, own])
    update = SimpleNamespace(parameters={"head": nn.Parameter(torch.ones(3)), "table": nn.Parameter(torch.ones(6, 3))})
    context: Any = SimpleNamespace(world=world, update=update, sparse={"table"})
    tables = Tables(context, rows({1: (6, 3)}, 2), {0: [], 1: []}, {0: [], 1: []})
    tables.begin({1: torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 3), (3, 3), is_coalesced=True)})
    parts, shapes = tables.whole_means()
    assert list(parts) == ["table[6:9]"] and shapes == {"table": (3, 3)}


def test_formats_refuse_sparse_gradients_with_any_number_of_workers() -> None:
    for workers, allowed in ((1, "any"), (2, "modules")):
        assert registry.sparse_gradients(Settings(batch=8), workers) == allowed
        for coded in (Settings(batch=8, wire="int8", exact=False), Settings(batch=8, exact="fixed-point")):
            assert registry.sparse_gradients(coded, workers) == "none"


def test_an_optimizer_of_sparse_gradients_alone_names_a_dense_one() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.line = nn.Embedding(9, 2, sparse=True), nn.Linear(2, 1)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.line(self.table(values.long()).sum(1))

    session = paceline.start(
        model=Summed(),
        optimizer=partial(torch.optim.SparseAdam, lr=0.1),
        loss=nn.functional.mse_loss,
        data=torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1)),
        batch=8,
    )
    with pytest.raises(
        InputError, match=r"'line.weight' has a dense gradient: SparseAdam .* give a dictionary of several"
    ):
        session.step(next(session.batches(steps=1)))
