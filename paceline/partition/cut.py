"""Layers of a model: the blocks of an ``nn.Sequential``, or the module calls of any other model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from paceline.errors import ConfigError
from paceline.partition.base import Layers
from paceline.partition.module_cut import ModuleCut
from paceline.partition.sequential import SequentialCut, is_sequential


def layers_of(model: nn.Module, example: Any) -> Layers:
    """Return the layers of a model; ``example`` is its input for one microbatch.

    Raises:
        InputError: the model cannot be cut, for example because a layer returns no tensor.
    """
    return SequentialCut(model, example) if is_sequential(model) else ModuleCut(model, example)


def bounds_of(layers: Layers, stages: int, cut: Sequence[str]) -> list[tuple[int, int]]:
    """Return the first layer and the end of each stage; ``cut`` names the layers at which stages 1, 2, ... begin."""
    names = layers.names
    if stages > len(names):
        raise ConfigError(
            f"{stages} stages need as many layers, but the model has {len(names)}: {', '.join(names)}. "
            f"Use fewer stages."
        )
    if len(cut) != stages - 1:
        raise ConfigError(
            f"The cut names {len(cut)} layers, but {stages} stages need {stages - 1}: those at which stages 1, 2, ... "
            f"begin. It is: {', '.join(cut) or 'empty'}."
        )
    places = [0, *(_index(name, names) for name in cut), len(names)]
    for stage, name in enumerate(cut, 1):
        if places[stage] <= places[stage - 1]:
            before = names[places[stage - 1]]
            raise ConfigError(
                f"Stage {stage} must begin after stage {stage - 1}, but layer {name!r} is not after {before!r}. "
                f"The layers are, in order: {', '.join(names)}."
            )
    return list(pairwise(places))


def _index(name: str, names: Sequence[str]) -> int:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, cutoff=0.0)
        raise ConfigError(f"The model has no layer {name!r} to cut at; closest: {near[0]!r}. All: {', '.join(names)}.")
    return names.index(name)
