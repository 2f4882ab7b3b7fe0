"""A pipeline over an ``nn.Sequential`` refuses what its stages would not see: changes around the blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.errors import InputError
from paceline.partition.sequential import SequentialCut

CHANGES: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "a block": (lambda model: model.__setitem__(1, nn.ReLU()), "The layer '1' of the model was replaced"),
    "a new block": (lambda model: model.append(nn.ReLU()), "The layer '3' of the model was added after"),
    "no block": (lambda model: model.pop(1), "The layer '1' of the model was replaced"),
    "one less": (lambda model: model[2].pop(1), r"The layer '2\.1' of the model was removed"),
    "a hook": (
        lambda model: model.register_forward_hook(lambda *_: None),
        "The model got another hook or another forward",
    ),
    "a hook of a container": (
        lambda model: model[2].register_forward_pre_hook(lambda *_: None),
        "The layer '2' of the model got",
    ),
    "a forward": (lambda model: setattr(model, "forward", torch.relu), "use strategy 'allreduce'"),
}


def cut() -> tuple[nn.Sequential, SequentialCut]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    return model, SequentialCut(model, torch.zeros(2, 4))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name: str) -> None:
    model, layers = cut()
    change, says = CHANGES[name]
    change(model)
    with pytest.raises(InputError, match=says):
        layers.check()


def test_changes_inside_of_a_block_are_seen_by_its_stage() -> None:
    model, layers = cut()
    model[0].register_forward_hook(lambda *_: None)
    model[2][1].forward = torch.relu
    model.eval()
    layers.check()
