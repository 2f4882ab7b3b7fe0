"""A model as layers: ``nn.Sequential`` block by block, any other model by a trace."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from paceline.errors import ConfigError
from paceline.partition.base import Layers
from paceline.partition.exported import ExportedCut
from paceline.partition.sequential import SequentialCut, is_list


def layers_of(model: nn.Module, example: Any) -> Layers:
    """The layers of a model; ``example`` is its input for one microbatch.

    Raises:
        InputError: the model cannot be cut: it cannot be traced, or a layer returns no tensor.
    """
    return SequentialCut(model, example) if is_list(model) else ExportedCut(model, example)


def bounds_of(layers: Layers, stages: int, cut: Sequence[str]) -> list[tuple[int, int]]:
    """The layers of each stage, from a cut: the names of the layers at which stages 1, 2, ... begin.

    Raises:
        ConfigError: there is no such cut.
    """
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
    places = [0, *(_place(name, names) for name in cut), len(names)]
    for place, name in enumerate(cut, 1):
        if places[place] <= places[place - 1]:
            before = names[places[place - 1]]
            raise ConfigError(
                f"Stage {place} must begin after stage {place - 1}, but layer {name!r} is not after {before!r}. "
                f"The layers are, in their order: {', '.join(names)}."
            )
    return list(pairwise(places))


def _place(name: str, names: Sequence[str]) -> int:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, cutoff=0.0)
        raise ConfigError(
            f"The model has no layer {name!r} to cut at; the nearest is {near[0]!r}. All: {', '.join(names)}."
        )
    return names.index(name)
