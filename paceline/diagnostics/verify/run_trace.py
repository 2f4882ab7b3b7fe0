"""Trace of a run, as written by :mod:`paceline.diagnostics.verify.trace_writer`. No torch.

Each line is a JSON object. The first describes the run and the state before step 0, and each later line a step. A
tensor is represented by its hash, its norm, and its dot product with a fixed vector of random signs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import InputError
from paceline.system.regular_files import read_text


@dataclass(frozen=True)
class TensorSketch:
    """Summary of a tensor. Equal bits have equal hashes, and different tensors have different projections."""

    hash: str
    norm: float
    projection: float


@dataclass(frozen=True)
class StepTrace:
    """Step of a run: loss, number of samples, learning rate, gradient, and the state after the step."""

    step: int
    loss: float | None = None
    samples: int | None = None
    learning_rate: float | None = None
    state: Mapping[str, TensorSketch] = field(default_factory=dict)
    # None if no worker has the whole gradient
    gradient: Mapping[str, TensorSketch] | None = field(default_factory=dict)


@dataclass(frozen=True)
class RunTrace:
    """Trace of a run. The first record is the state before step 0."""

    records: tuple[StepTrace, ...]
    epsilon: float = 2.0**-23
    exact: bool = False
    threads: int | None = None
    batch: int | None = None

    def fingerprint(self) -> str:
        last = {name: tensor.hash for name, tensor in self.records[-1].state.items()}
        return hashlib.sha256(json.dumps(last, sort_keys=True).encode()).hexdigest()[:12]


def read(path: Path) -> RunTrace:
    """Read the trace of a run. Raises InputError if the file does not exist or is not a trace."""
    try:
        lines = [json.loads(line) for line in read_text(path).splitlines()]
        head = lines[0]
        return RunTrace(
            records=tuple(_record(line) for line in lines),
            epsilon=float(head["epsilon"]),
            exact=bool(head["exact"]),
            threads=head.get("threads"),
            batch=head.get("batch"),
        )
    except FileNotFoundError:
        raise InputError(
            "The script left no trace: it must call paceline.start and train with session.batches and session.step."
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not the trace of a run: {error!r}.") from None


def _record(line: Mapping[str, Any]) -> StepTrace:
    return StepTrace(
        step=int(line["step"]),
        loss=line.get("loss"),
        samples=line.get("samples"),
        learning_rate=line.get("learning_rate"),
        state=_sketches(line.get("state")) or {},
        gradient=_sketches(line.get("gradient", {})),
    )


def _sketches(tensors: Mapping[str, Any] | None) -> dict[str, TensorSketch] | None:
    return None if tensors is None else {name: TensorSketch(*parts) for name, parts in tensors.items()}
