"""Where two runs differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["end", "samples", "learning rate", "loss", "gradient", "parameter", "buffer", "optimizer"]


@dataclass(frozen=True)
class Difference:
    """One value that is not the same in two runs.

    Attributes:
        step: of which step; -1: before the first one.
        kind: of the value.
        name: of a tensor.
        reference: the value, or the hash, in the reference run.
        other: in the other run.
        beyond: rounding does not explain it.
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
