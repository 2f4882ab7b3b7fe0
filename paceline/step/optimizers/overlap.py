"""Checks that each element of the parameters has memory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import nn

from paceline.errors import InputError
from paceline.system.torch_internals import storage_id


def check_elements(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise InputError if several elements of a parameter are one number in memory."""
    for name, value in parameters.items():
        if any(size > 1 and not stride for size, stride in zip(value.shape, value.stride(), strict=True)):
            raise InputError(
                f"The parameter {name!r} of shape {list(value.shape)} and strides {list(value.stride())} has several "
                f"elements in the same memory, as after expand(), so no optimizer can update it. Train the tensor that "
                f"was expanded, and expand it in the forward pass, or clone() the expanded one."
            )


def check_apart(parameters: Mapping[str, nn.Parameter], strategy: str) -> None:
    """Raise InputError if parameters have memory in common and different workers update them.

    Parameters with gaps are not compared: they may lie between each other without a common element.
    """
    known = sorted(  # not by data_ptr(), which gives memory to the values of a deferred model
        (storage_id(value), value.storage_offset() * value.element_size(), value.nbytes, name)
        for name, value in parameters.items()
        if value.nbytes and _is_dense(value)
    )
    for (storage, start, size, name), (other, begin, _, second) in pairwise(known):
        if storage == other and begin < start + size:
            raise InputError(
                f"The parameters {name!r} and {second!r} have memory in common, so an update of one changes the "
                f"other. With strategy {strategy!r}, different workers update them. To tie weights, assign the "
                f"parameter itself, as in decoder.weight = encoder.weight, not its .data. Otherwise clone() one, or "
                f"use strategy 'allreduce'."
            )


def _is_dense(value: nn.Parameter) -> bool:
    """Return whether there are no gaps between the elements, as after a transposition."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return last == value.numel() - 1
