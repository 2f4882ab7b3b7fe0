"""Outputs of the model for all samples, in the order of the samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from paceline.errors import InputError
from paceline.step.loss import Forward, described, pair_of


class Predictions:
    """Model outputs, as tensors on the host whose first dimension is the sample dimension.

    Args:
        forward: ``forward(model, microbatch)``. Defaults to the model called with the input of a pair (input, target).
        by_loss: whether the data set gives such pairs.
    """

    def __init__(self, forward: Forward | None, *, by_loss: bool) -> None:
        if forward is None and not by_loss:
            raise InputError(
                "In a session with forward= the model's output is unknown: call predict(data, forward) with a "
                "function of (model, microbatch) that returns it."
            )
        self._forward = _output if forward is None else forward

    def compute(self, model: nn.Module, data: Any, samples: int) -> Any:
        """Return the outputs for some samples."""
        return _on_host(self._forward(model, data), samples)

    def combine(self, contributions: list[Any]) -> Any:
        """Return the outputs for all samples."""
        outlines = list(map(_outline, contributions))
        if (other := next((one for one in outlines if one != outlines[0]), None)) is not None:
            raise InputError(
                f"The parts of the outputs differ between microbatches, {outlines[0]} and {other}: they cannot be "
                f"joined. Return the same parts for every microbatch."
            )
        return _joined(contributions)


def _output(model: nn.Module, data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return model(data)
    return model(data[0] if isinstance(data, list | tuple) and len(data) == 1 else pair_of(data)[0])


def _on_host(value: Any, samples: int) -> Any:
    """Copy the output for some samples to the host, in plain containers."""
    if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == samples:
        return value.detach().to("cpu", copy=True)
    if isinstance(value, list) and len(value) == samples:
        return [one.detach().to("cpu", copy=True) if isinstance(one, torch.Tensor) else one for one in value]
    if isinstance(value, Mapping):
        return {key: _on_host(one, samples) for key, one in value.items() if one is not None}
    if is_dataclass(value) and not isinstance(value, type):
        return _on_host({field.name: getattr(value, field.name) for field in fields(value)}, samples)
    if isinstance(value, tuple):
        return tuple(_on_host(one, samples) for one in value)
    raise InputError(
        f"The output for {samples} samples is {described(value)}. predict gathers tensors whose first dimension is "
        f"that of the samples, lists with one entry for each of them, and tuples and dictionaries of these: give "
        f"predict(..., forward=...), a function of (model, microbatch) that returns what you need."
    )


def _outline(value: Any) -> Any:
    """Return the containers of an output, with type names in place of values."""
    if isinstance(value, dict):
        return {key: _outline(one) for key, one in value.items()}
    return tuple(map(_outline, value)) if isinstance(value, tuple) else type(value).__name__


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        other = next((one for one in parts if one.shape[1:] != first.shape[1:]), None)
        if other is not None:
            raise InputError(
                f"The sizes of the outputs differ between microbatches, {list(first.shape)} and {list(other.shape)}: "
                f"they cannot become one tensor. Pad them to one size, or return a list with one entry for each sample."
            )
        return torch.cat(parts)
    if isinstance(first, list):
        return [one for part in parts for one in part]
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    return tuple(_joined(list(column)) for column in zip(*parts, strict=True))
