"""Matching of weights to the names of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from paceline.errors import CheckpointError

_MOST = 3  # maximum number of names in a message


@dataclass(frozen=True)
class Matched:
    """Weights that fit a model."""

    tensors: dict[str, torch.Tensor]  # tensors by the names of the model's ``state_dict``
    missing: tuple[str, ...]  # names of the model without a tensor
    unknown: tuple[str, ...]  # names, as renamed, that the model does not have

    def describe(self, where: Path | str) -> str:
        """Describe what was loaded and what was not, in a sentence."""
        said = f"weights from {where}: {len(self.tensors)} tensors"
        if self.missing:
            said += f"; not in it, so with their initial values: {_named(self.missing)}"
        if self.unknown:
            said += f"; not in the model, so left out: {_named(self.unknown)}"
        return said


def match(
    model: nn.Module,
    given: Mapping[str, torch.Tensor],
    where: Path | str,  # source of the tensors, for messages
    *,
    rename: Sequence[str] = (),  # prefixes to replace, as ``old=new``. The longest matching prefix applies.
    skip: Sequence[str] = (),  # prefixes of model names that are not loaded
    strict: bool = True,  # whether to raise if a name is missing or unknown
) -> Matched:
    state = {name: one for name, one in model.state_dict(keep_vars=True).items() if isinstance(one, torch.Tensor)}
    other_buffers = {name for name, _ in model.named_buffers()} - state.keys()  # not persistent
    named = {name: value for name, value in _renamed(given, rename, where).items() if name not in other_buffers}
    skipped = tuple(skip)
    wanted = {name: one for name, one in state.items() if not name.startswith(skipped)}
    tensors = {name: value for name, value in named.items() if name in wanted}
    _check_shapes(tensors, wanted, where)
    there = {id(wanted[name]) for name in tensors}  # a tied weight may be given under only one of its names
    missing = tuple(name for name, one in wanted.items() if id(one) not in there)
    unknown = tuple(name for name in named if name not in state)
    if not tensors:
        raise CheckpointError(
            f"None of the {len(given)} tensors in {where} has a name of the model: it has {_named(list(given))}, the "
            f"model {_named(list(state))}.{_hint(named, state)}"
        )
    if strict and (missing or unknown):
        lacks = f" It has no {_named(missing)}." if missing else ""
        more = f" The model has no {_named(unknown)}." if unknown else ""
        raise CheckpointError(
            f"The weights in {where} are not those of the model.{lacks}{more}{_hint(named, state)} Rename "
            f"(weights.rename), skip names of the model (weights.skip), or load what fits (weights.strict=false)."
        )
    return Matched(tensors, missing, unknown)


def _renamed(given: Mapping[str, torch.Tensor], rename: Sequence[str], where: Path | str) -> dict[str, torch.Tensor]:
    pairs = sorted((one.split("=") for one in rename), key=lambda pair: -len(pair[0]))
    found: dict[str, torch.Tensor] = {}
    for name, value in given.items():
        old, new = next(((old, new) for old, new in pairs if name.startswith(old)), ("", ""))
        now = new + name.removeprefix(old)
        if now in found:
            raise CheckpointError(f"weights.rename gives two tensors of {where} the name {now!r}.")
        found[now] = value
    return found


def _check_shapes(tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], where: Path | str) -> None:
    differ = [
        f"{name!r} is {list(value.shape)}, the model's is {list(wanted[name].shape)}"
        for name, value in tensors.items()
        if value.shape != wanted[name].shape
    ]
    if differ:
        more = f"; {len(differ) - _MOST} more differ" if len(differ) > _MOST else ""
        raise CheckpointError(
            f"The weights in {where} do not have the shapes of the model: {'; '.join(differ[:_MOST])}{more}. Build the "
            f"same model, or leave them out (weights.skip)."
        )


def _hint(given: Collection[str], state: Collection[str]) -> str:
    """Suggest ``weights.rename`` if a common prefix is the only difference."""
    theirs, ours = _beginning(given), _beginning(state)
    if theirs and {name.removeprefix(theirs) for name in given} & set(state):
        return f" Without {theirs!r} in front names fit: weights.rename={theirs}="
    if ours and {ours + name for name in given} & set(state):
        return f" With {ours!r} in front names fit: weights.rename=={ours}"
    return ""


def _beginning(names: Collection[str]) -> str:
    """Return the module that all names begin with, with its dot, or ""."""
    first = {name.partition(".")[0] + "." for name in names}
    return first.pop() if len(first) == 1 else ""


def _named(names: Sequence[str]) -> str:
    """Return the first names and the number of further names."""
    text = ", ".join(repr(name) for name in names[:_MOST])
    return f"{text} and {len(names) - _MOST} more" if len(names) > _MOST else text
