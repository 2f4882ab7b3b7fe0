"""Loading the tensors of an optimizer: into those it has where they fit, else into new ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from paceline.checkpoint.tensors import load_named_tensors, load_optimizer_state, named_tensors, optimizer_state
from paceline.errors import CheckpointError
from paceline.schedule.slices import Slice, rows
from paceline.strategies.sharded.shards import OptimizerShard, unite


@pytest.mark.parametrize(
    ("existing", "kept"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(2, 3, 4), False),
        (torch.ones(3, 4, dtype=torch.float64), False),
        (torch.ones(4, 3).t(), False),
        (None, False),
    ],
    ids=["the same", "another shape", "another type", "other strides", "none"],
)
def test_a_value_goes_where_it_fits(existing: torch.Tensor | None, kept: bool) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if existing is not None:
        optimizer.state[model.weight]["momentum_buffer"] = existing
    value = torch.arange(12.0).view(3, 4)
    load_optimizer_state(model, optimizer, [("optimizer/weight/momentum_buffer", value)])
    loaded = optimizer.state[model.weight]["momentum_buffer"]
    assert torch.equal(loaded, value) and loaded.dtype == value.dtype and loaded.shape == value.shape
    assert (loaded is existing) == kept and loaded is not value


def test_loaded_tensors_do_not_stay_beside_their_copies() -> None:
    """The moments of a whole state would need half as much memory again."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    tensors = {name: value.clone() for name, value in named_tensors(model, optimizer).items()}
    given = {name: ref(value) for name, value in tensors.items()}
    load_named_tensors(model, optimizer, tensors)
    assert len(given) == 8 and not tensors and all(one() is None for one in given.values())


def test_a_count_is_a_number_again() -> None:
    """A power of a tensor is computed in float32, so a resumed SparseAdam would have other bits."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] |= {"step": 3, "skipped": True, "size": torch.tensor(3.0)}
    state = dict(optimizer_state(model, optimizer))
    load_optimizer_state(model, optimizer, state.items())
    loaded = optimizer.state[model.weight]
    assert [type(loaded[key]) for key in ("step", "skipped", "size")] == [int, bool, torch.Tensor]
    assert (loaded["step"], loaded["skipped"], loaded["size"]) == (3, True, 3.0)


def test_a_parameter_that_the_model_does_not_have() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="optimizer state for 'other', which the model does not have"):
        load_optimizer_state(model, optimizer, [("optimizer/other/momentum_buffer", torch.ones(1))])


def test_numbers_stay_numbers() -> None:
    """A step that becomes a tensor would give ``beta**step`` other bits, and a float would be rounded."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"step": 3, "scale": 0.1, "warm": True, "mean": torch.ones(3, 4)}
    optimizer.state[model.weight] = dict(state)
    load_optimizer_state(model, optimizer, [*optimizer_state(model, optimizer)])
    update: Any = SimpleNamespace(optimizer=optimizer, parameters=dict(model.named_parameters()), row_states={})
    context: Any = SimpleNamespace(update=update)
    shard = OptimizerShard(context, [Slice(0, 0, 8, 0), Slice(0, 8, 12, 1), Slice(1, 0, 3, 0)], [0, 1])
    shard.divide()
    shard.load(shard.tensors())
    assert all(optimizer.state[value]["mean"].numel() == value.numel() for value in shard.own.values())
    unite(update, shard.release())
    found = optimizer.state[model.weight]
    assert found.keys() == state.keys() and torch.equal(found["mean"], torch.ones(3, 4))
    assert all(type(found[key]) is type(value) and found[key] == value for key, value in state.items() if key != "mean")


@pytest.mark.parametrize("rest", [(), (1,)])
def test_a_state_of_rows_is_cut_as_its_table(rest: tuple[int, ...]) -> None:
    model, name = torch.nn.Embedding(10, 4), "optimizer/weight/sum"
    update: Any = SimpleNamespace(
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1), parameters=dict(model.named_parameters())
    )
    update.row_states = {name: torch.Size((10, *rest))}
    whole, found = torch.arange(10.0).view(10, *rest), dict[str, torch.Tensor]()
    every = rows({0: (10, 4)}, 3)
    for held in ([0], [1, 2]):
        context: Any = SimpleNamespace(update=update)
        shard = OptimizerShard(context, every, held)
        shard.load({name: whole, "optimizer/weight/step": torch.tensor(3.0)})
        for one in shard.own.values():
            assert update.optimizer.state[one]["sum"].shape == (len(one), *rest)
        shard.load(shard.tensors())
        for one in shard.own.values():
            assert update.optimizer.state[one]["sum"].shape == (len(one), *rest)
        found |= shard.release()
    assert [key for key in found if key != "optimizer/weight/step"] == [
        f"{name}[{one.start // 4}:{one.stop // 4}]" for one in every
    ]
    update.optimizer.state[model.weight] = {}
    unite(update, found)
    assert torch.equal(update.optimizer.state[model.weight]["sum"], whole)


def test_the_strides_are_those_of_the_parameter() -> None:
    """A fused update goes through the memory of both in order: with other strides each weight gets another's moment."""
    model = torch.nn.Linear(4, 3)
    model.weight = torch.nn.Parameter(torch.ones(4, 3).t())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"optimizer/weight/momentum_buffer": torch.arange(12.0).view(3, 4)}
    load_optimizer_state(model, optimizer, state.items())
    found = [optimizer.state[model.weight]["momentum_buffer"]]
    update: Any = SimpleNamespace(optimizer=optimizer, parameters=dict(model.named_parameters()), row_states={})
    context: Any = SimpleNamespace(update=update)
    shard = OptimizerShard(context, [Slice(0, 0, 12, 0), Slice(1, 0, 3, 0)], [0, 1])
    shard.load(state)
    found.append(optimizer.state[shard.own[0]]["momentum_buffer"])
    for value in found:
        assert value.stride() == model.weight.stride() and torch.equal(value, *state.values())
