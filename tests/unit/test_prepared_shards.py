"""Shards of a state that were loaded for workers who never trained with them."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it, and it sets a variable of the environment
from torch import nn

from paceline.errors import WorkerLost
from paceline.schedule.slices import Slice, slice_name
from paceline.step.context import HeldShare
from paceline.strategies.sharded import prepared
from paceline.strategies.sharded.prepared import PreparedShards
from paceline.strategies.sharded.shards import OptimizerShard, unite


def made_for() -> tuple[PreparedShards, Any]:
    """What one of two workers prepares for half of a weight, and the update of the model."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, affine=False))
    optimizer = torch.optim.AdamW(model.parameters())
    context: Any = SimpleNamespace(
        update=SimpleNamespace(optimizer=optimizer, parameters=dict(model.named_parameters()), row_states={})
    )
    made = PreparedShards.__new__(PreparedShards)
    made._model, made._frozen, made.weights, made.is_loaded = model, {}, None, False
    made._parameters, made._moved, made._held = dict(model.named_parameters()), None, HeldShare()
    made.number, made._kept, made._row_states = (0, 2), {}, {}
    made._optimizer, made._sizes, made._world = optimizer, {"0.weight": 16}, None  # type: ignore[assignment]
    slices = [Slice(0, 0, 8, 0), Slice(0, 8, 16, 1)]
    made.shard, made.of_parameter = OptimizerShard(context, slices, [0]), {"0.weight": slices}
    return made, context.update


def trained(update: Any) -> torch.Tensor:
    """The first moments of a weight after a step."""
    for value in update.parameters.values():
        value.grad = torch.ones_like(value)
    update.optimizer.step()
    moments: torch.Tensor = update.optimizer.state_dict()["state"][0]["exp_avg"]
    return moments.clone()


def test_a_whole_state_is_held_until_all_have_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that joins may be lost before it says that it has all."""
    made, update = made_for()
    moments, part = trained(update), slice_name("optimizer/0.weight/exp_avg", 0, 8)

    def moved(world: None, held: dict[str, torch.Tensor], *_: Any) -> dict[str, torch.Tensor]:
        return {part: held["optimizer/0.weight/exp_avg"].view(-1)[:8]}

    monkeypatch.setattr(prepared, "move_shares", moved)
    made.move(None, "")
    made.load({})
    owned = made.release()
    assert owned is not None and owned >= {"0.weight", slice_name("0.weight", 0, 8)}
    assert made._held.tensors["optimizer/0.weight/exp_avg"].equal(moments)


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_worker_that_is_behind_drops_its_state_when_it_has_another(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, update = made_for()
    trained(update)
    made._held.add({"0.weight"}, {"optimizer/0.weight/exp_avg": torch.zeros(4, 4)})

    def moved(world: None, held: dict[str, torch.Tensor], *_: Any) -> dict[str, torch.Tensor]:
        assert not held, "that of an earlier step"
        if interrupted:
            raise WorkerLost("rank 1 was lost")
        return {}

    monkeypatch.setattr(prepared, "move_shares", moved)
    with pytest.raises(WorkerLost) if interrupted else contextlib.nullcontext():
        made.move(frozenset(), "")
    assert bool(update.optimizer.state_dict()["state"]) == bool(made._held.names) == interrupted


def test_loaded_shards_that_are_released_are_held_until_they_are_moved() -> None:
    made, update = made_for()
    model, optimizer = made._model, update.optimizer
    tensors = {f"parameter/{name}": value.detach().clone() for name, value in model.named_parameters()}
    tensors |= {f"buffer/{name}": value.clone() for name, value in model.named_buffers()}
    made.load(tensors | {slice_name("optimizer/0.weight/exp_avg", 0, 8): torch.ones(8)})
    assert made.release() == {slice_name("0.weight", 0, 8), *(name for name, _ in model.named_buffers())}
    assert made._held.names == {slice_name("0.weight", 0, 8)}
    ((name, value),) = made._held.tensors.items()
    assert name == slice_name("optimizer/0.weight/exp_avg", 0, 8) and value.eq(1.0).all()
    assert not optimizer.state_dict()["state"]
    unite(update, made._held.tensors)
    (state,) = optimizer.state_dict()["state"].values()
    assert state["exp_avg"].shape == (4, 4) and state["exp_avg"][:2].eq(1.0).all() and not made._held.tensors


@pytest.mark.parametrize("has_weights", [True, False])
def test_only_slices_of_the_optimizer_move_between_workers_that_have_all_weights(
    has_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has all of them keeps them, and may send any of them to one that joins."""
    made, _ = made_for()
    part = slice_name("0.weight", 0, 8)
    made._held.add({part}, {slice_name("optimizer/0.weight/exp_avg", 0, 8): torch.zeros(8)})
    made._held.has_weights, found = has_weights, list[str]()
    monkeypatch.setattr(prepared, "move_shares", lambda _, held, *__: found.extend(held) or {})
    made.move(frozenset({part, "1.running_mean"}), "")
    weights = "parameter/0.weight" if has_weights else f"parameter/{part}"
    assert sorted(found) == [slice_name("optimizer/0.weight/exp_avg", 0, 8), weights]


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_slice_that_stays_is_not_copied(is_behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = made_for()
    part, moments = slice_name("0.weight", 0, 8), torch.zeros(8)
    made._held.add({part}, {slice_name("optimizer/0.weight/exp_avg", 0, 8): moments})
    targets: list[torch.Tensor] = []

    def moved(*_: Any) -> dict[str, torch.Tensor]:
        targets.append(made.target("optimizer/0.weight/exp_avg", slice(0, 8), moments.dtype, torch.Size([4, 4])))
        return {}

    monkeypatch.setattr(prepared, "move_shares", moved)
    made.move(frozenset() if is_behind else frozenset({part}), "")
    assert (targets[0] is moments) != is_behind, "the values of an earlier step are kept until all have others"


def test_a_copy_is_sent_from_where_it_is_after_an_interrupted_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that all see may have a half of the update of a lost owner."""
    made, _ = made_for()
    part, copy, found = slice_name("0.weight", 0, 8), torch.ones(8), dict[str, torch.Tensor]()
    made._held.add({part}, {f"parameter/{part}": copy})
    monkeypatch.setattr(prepared, "move_shares", lambda _, held, *__: found.update(held) or {})
    made.move(frozenset({part}), "")
    assert found[f"parameter/{part}"] is copy
