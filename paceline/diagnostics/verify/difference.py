"""Differences between two runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["end", "samples", "learning rate", "loss", "gradient", "parameter", "buffer", "optimizer"]


@dataclass(frozen=True)
class Difference:
    """Value that differs between two runs.

    Attributes:
        step: step of the value, or -1 before the first step.
        kind: kind of the value.
        name: name of the tensor, if the value is a tensor.
        reference: value in the reference run, the hash of a tensor, or whether a tensor exists.
        other: the same in the other run.
        beyond: whether the difference exceeds rounding.
    """

    step: int
    kind: Kind
    name: str = ""
    reference: object = None
    other: object = None
    beyond: bool = False

    def __str__(self) -> str:
        what = f"{self.kind} {self.name}".strip()
        return f"{what} before step 0" if self.step < 0 else f"{what} of step {self.step}"
