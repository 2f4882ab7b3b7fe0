"""Outputs of a microbatch for a loss over the whole batch: rows, one for each sample, and sums over the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paceline.comm.values import sendable
from paceline.errors import InputError, name_microbatches
from paceline.step.loss import described

_FORMS = (
    "With batch_loss=, forward(model, microbatch) must return a tensor whose first dimension is that of the samples, "
    "paceline.Sum(tensor), or a dictionary of these"
)


class Sum:
    """Output of ``forward`` that is added up over the microbatches of a batch, for a loss over the whole batch.

    In a session with ``batch_loss``, ``forward`` returns a Sum, alone or in a dictionary. ``batch_loss`` gets the sum
    over the batch as a tensor of the same shape, such as the load of each expert or a cross-correlation matrix. With
    ``exact`` the sum has the same bits on any number of workers.

    Args:
        tensor: tensor of any shape, the same for every microbatch. Tensors of 16 bits are added up in float32,
            whole numbers in float64.

    Raises:
        InputError: the argument is not a dense tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if not _is_dense(tensor):
            raise InputError(f"paceline.Sum takes a dense tensor, but it got {described(tensor)}.")
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"paceline.Sum({described(self.tensor)})"


@sendable
class OutputForm(NamedTuple):
    """Form of an output, the same for all microbatches of a batch: whether it is a sum, its type, and its shape.

    The shape of rows is that of one sample.
    """

    added: bool
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        kind = "a paceline.Sum" if self.added else "rows"
        return f"{kind} of shape {list(self.shape)} and type {self.dtype}"


@dataclass(frozen=True)
class Outputs:
    """Outputs of a microbatch by name. The name of a single output is empty."""

    tensors: dict[str, torch.Tensor]
    forms: dict[str, OutputForm]

    def select(self, *, added: bool) -> dict[str, torch.Tensor]:
        """Return the sums, or the rows."""
        return {name: value for name, value in self.tensors.items() if self.forms[name].added is added}


def outputs_of(value: Any, samples: int | None, microbatches: range = range(1)) -> Outputs:
    """Return the outputs in the result of a forward pass, in the order of their names."""
    if isinstance(value, Mapping):
        if not value or not all(isinstance(name, str) and name for name in value):
            returned = described(value) if value else "an empty dictionary"
            raise InputError(f"{_FORMS} by name, but it returned {returned}.")
        entries = {name: value[name] for name in sorted(value)}
    else:
        entries = {"": value}
    tensors, forms = dict[str, torch.Tensor](), dict[str, OutputForm]()
    for name, entry in entries.items():
        tensor = entry.tensor if isinstance(entry, Sum) else entry
        if not _is_dense(tensor):
            raise InputError(f"{_FORMS}, but {spelled(name)} {_what_else(entry, name)}")
        if not isinstance(entry, Sum):
            _check_rows(name, tensor, samples, microbatches)
        shape = tensor.shape if isinstance(entry, Sum) else tensor.shape[1:]
        tensors[name] = tensor
        forms[name] = OutputForm(isinstance(entry, Sum), str(tensor.dtype), tuple(shape))
    return Outputs(tensors, forms)


def _is_dense(value: Any) -> bool:
    """Return whether a value is a tensor that has all of its values in one block."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not (value.is_meta or value.is_nested)


def _what_else(entry: Any, name: str) -> str:
    """Describe an output that is not a dense tensor, and what to return instead."""
    if not isinstance(entry, torch.Tensor):
        cure = " Name its tensors in a dictionary." if isinstance(entry, tuple | list) and not name else ""
        return f"is {described(entry)}.{cure}"
    if entry.is_meta:
        return "is on the device 'meta', so it has no values."
    if entry.is_nested:
        return "is a nested tensor: pad its rows to one size."
    return f"is {described(entry)}. Its layout is {entry.layout}: use .to_dense()."


def _check_rows(name: str, tensor: torch.Tensor, samples: int | None, microbatches: range) -> None:
    if tensor.ndim and (samples is None or len(tensor) == samples):
        return
    shape = f"the shape {list(tensor.shape)}" if tensor.ndim else "no dimension"
    raise InputError(
        f"{_FORMS}, but {spelled(name)} has {shape} for the {samples or ''} samples of "
        f"{name_microbatches(microbatches)}. Return one row for each sample, several views of a sample under several "
        f"names or in a second dimension; return values that belong to no sample as paceline.Sum(tensor)."
    )


def spelled(name: str) -> str:
    """Return how a message names an output."""
    return f"the output {name!r}" if name else "the output"


def check_forms(known: Mapping[str, OutputForm], found: Mapping[str, OutputForm], where: str, other: str) -> None:
    """Raise InputError if two microbatches have outputs of different forms."""
    if known == found:
        return
    if known.keys() != found.keys():
        raise InputError(
            f"forward returned the outputs {_listed(known)} for {where}, but {_listed(found)} for {other}. Return the "
            f"same names for every microbatch, on every worker."
        )
    name = next(name for name in known if known[name] != found[name])
    raise InputError(
        f"{spelled(name).capitalize()} of forward is {known[name]} for {where}, but {found[name]} for {other}: they "
        f"cannot be put together. Return the same form for every microbatch; pad rows to one size."
    )


def _listed(forms: Mapping[str, OutputForm]) -> str:
    return ", ".join(repr(name) for name in forms) if "" not in forms else "of a single tensor"
