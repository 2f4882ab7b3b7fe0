"""Shards of a state that were loaded for workers who never trained with them."""

from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it, and it sets a variable of the environment
from torch import nn

from paceline.schedule.slices import Slice, slice_name
from paceline.step.context import HeldShare
from paceline.strategies.sharded.prepared import PreparedShards
from paceline.strategies.sharded.shards import OptimizerShard, unite


def test_loaded_shards_that_are_released_are_held_until_they_are_moved() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, affine=False))
    optimizer = torch.optim.AdamW(model.parameters())
    context: Any = SimpleNamespace(
        update=SimpleNamespace(optimizer=optimizer, parameters=dict(model.named_parameters()))
    )
    made = PreparedShards.__new__(PreparedShards)
    made._model, made._frozen, made.weights, made.is_loaded = model, {}, None, False
    made._parameters, made._moved, made._held = dict(model.named_parameters()), None, HeldShare()
    made.shard = OptimizerShard(context, [Slice(0, 0, 8, 0), Slice(0, 8, 16, 1)], [0])
    tensors = {f"parameter/{name}": value.detach().clone() for name, value in model.named_parameters()}
    tensors |= {f"buffer/{name}": value.clone() for name, value in model.named_buffers()}
    made.load(tensors | {slice_name("optimizer/0.weight/exp_avg", 0, 8): torch.ones(8)})
    assert made.release() == {slice_name("0.weight", 0, 8), *(name for name, _ in model.named_buffers())}
    assert made._held.names == {slice_name("0.weight", 0, 8)}
    ((name, value),) = made._held.tensors.items()
    assert name == slice_name("optimizer/0.weight/exp_avg", 0, 8) and value.eq(1.0).all()
    assert not optimizer.state_dict()["state"]
    unite(context.update, made._held.tensors)
    (state,) = optimizer.state_dict()["state"].values()
    assert state["exp_avg"].shape == (4, 4) and state["exp_avg"][:2].eq(1.0).all() and not made._held.tensors
