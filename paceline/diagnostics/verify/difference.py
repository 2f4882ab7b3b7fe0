"""Differences between two runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["end", "samples", "learning rate", "loss", "gradient", "parameter", "buffer", "optimizer"]


@dataclass(frozen=True)
class Difference:
    """Value that differs between two runs."""

    step: int  # step of the value, or -1 before the first step
    kind: Kind  # kind of the value
    name: str = ""  # name of the tensor, if the value is a tensor
    reference: object = None  # value in the reference run, the hash of a tensor, or whether a tensor exists
    other: object = None  # the same in the other run
    beyond: bool = False  # whether the difference exceeds rounding

    def __str__(self) -> str:
        what = f"{self.kind} {self.name}".strip()
        return f"{what} before step 0" if self.step < 0 else f"{what} of step {self.step}"
