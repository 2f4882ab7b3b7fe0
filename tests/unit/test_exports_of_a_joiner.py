"""Weights that a joined worker asks for after the other workers have."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn, optim

from paceline.checkpoint.weights.averages import Averages
from paceline.errors import InputError
from paceline.settings import AverageSettings
from paceline.strategies.pipeline.release import Released
from paceline.training.exports import Exports
from paceline.training.loop import TrainingLoop


def test_a_stage_of_a_pipeline_cannot_give_them() -> None:
    model = nn.Linear(3, 2)
    released = Released(model, optim.SGD(model.parameters()), {"bias"}, {"bias"})
    update: Any = optim.SGD(model.parameters())
    update.evaluating, update.averages = nullcontext, Averages(AverageSettings(kind="ema"), update)
    context = SimpleNamespace(
        compute=SimpleNamespace(model=model),
        update=update,
        settings=SimpleNamespace(strategy="pipeline"),
        world=SimpleNamespace(rank=1),
    )
    position, progress = SimpleNamespace(asked=6, target=6), SimpleNamespace(steps=9)
    exports = Exports(cast(TrainingLoop, SimpleNamespace(context=context, position=position, progress=progress)))
    assert exports.weights(everywhere=True).keys() == {"weight", "bias"}
    update.averages.divided = nullcontext
    with update.averages.choose(), pytest.raises(InputError, match=r"has a part of the weights only"):
        exports.weights(everywhere=True)
    released.release()
    assert exports.weights(everywhere=False) == {}
    with pytest.raises(InputError, match=r"before this worker joined or resumed.*everywhere=False"):
        exports.weights(everywhere=True)
