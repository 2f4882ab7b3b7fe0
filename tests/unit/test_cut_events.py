"""What is recorded when a model is cut: the bounds that are used, and on what."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from paceline.comm.collectives.subgroup import Subgroup
from paceline.data.feed import MicrobatchGroup
from paceline.data.objects.forward_values import ForwardValues
from paceline.errors import InputError
from paceline.schedule.pipeline.synchronous import one_forward_one_backward
from paceline.settings import Settings
from paceline.step.context import TrainingContext
from paceline.strategies.pipeline.stages import Partition, Stages


def job_of(model: nn.Module, changing: list[str], told: list[dict[str, Any]]) -> TrainingContext:
    """As the first of two workers sees it."""
    group = MicrobatchGroup(range(1), 4, (torch.zeros(4, 6), torch.zeros(4)))
    buffers = SimpleNamespace(agreed=changing, fixed=False)
    return cast(
        TrainingContext,
        SimpleNamespace(
            world=SimpleNamespace(
                rank=0,
                size=2,
                gather=lambda told, during: [told, told],
                open_communicators=lambda communicators: None,
            ),
            compute=SimpleNamespace(
                model=model, buffers=buffers, batch_loss=None, input_of=lambda group: group.data[0]
            ),
            update=SimpleNamespace(parameters=dict(model.named_parameters()), optimizer=None),
            feed=SimpleNamespace(load=lambda step, parts: [group]),
            settings=Settings(),
            loop=SimpleNamespace(noting_forward=nullcontext, forward_values=ForwardValues({})),
            events=SimpleNamespace(mark=lambda event, **fields: told.append({"event": event, **fields})),
        ),
    )


def test_a_cut_is_recorded_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subgroup, "__init__", lambda *_: None)
    norm, told = nn.BatchNorm1d(6), list[dict[str, Any]]()
    model = nn.Sequential(norm, nn.Linear(6, 6), norm, nn.Linear(6, 1))
    context = job_of(model, ["0.running_mean"], told)
    with pytest.raises(InputError, match=r"both change the buffer '0.running_mean'"):
        Stages(context, one_forward_one_backward(2, 4), Partition([(0, 2), (2, 4)]))
    assert told == []
    Stages(context, one_forward_one_backward(2, 4), Partition([(0, 3), (3, 4)]))
    (cut,) = told
    assert (cut["event"], [len(stage) for stage in cut["stages"]], cut["again"]) == ("cut", [3, 1], True)
