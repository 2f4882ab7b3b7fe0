"""Reductions after which each member keeps its own rows: ``reducescatter`` and its variants."""

from __future__ import annotations

from typing import Any

import torch

from paceline.horovod.engine.handle import Handle
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.torch.compression import Compression, Compressor, compressed
from paceline.horovod.torch.gathering import grouped_allgather
from paceline.horovod.torch.handles import Tensors, differentiated
from paceline.horovod.torch.requests import Average, Sum, submit


def _start(
    tensors: Tensors,
    name: str | None,
    op: Any,
    process_set: ProcessSet,
    factors: tuple[float, float],
    grouped: bool = False,
) -> Handle:
    if op not in (Average, Sum):
        raise NotImplementedError(f"reducescatter is for Average and Sum, not for {op}.")
    values: dict[str, Any] = {"op": str(op), "prescale": float(factors[0]), "postscale": float(factors[1])}
    return submit("reducescatter", tensors, [None] * len(tensors), name, process_set, grouped, **values)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`reducescatter` and return a handle for ``poll`` and ``synchronize``."""
    return _start([tensor], name, op, process_set, (prescale_factor, postscale_factor))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor and return this member's rows. If rows do not divide evenly, the first members get one more."""
    factors = prescale_factor, postscale_factor
    return _scattered([tensor], name, compression, op, factors, process_set)[0]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`grouped_reducescatter` and return a handle for ``poll`` and ``synchronize``."""
    factors = prescale_factor, postscale_factor
    return _start(tensors, name, op, process_set, factors, grouped=True)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors as one operation, each as :func:`reducescatter` does."""
    factors = prescale_factor, postscale_factor
    return _scattered(tensors, name, compression, op, factors, process_set, grouped=True)


def _scattered(
    tensors: Tensors,
    name: str | None,
    compression: type[Compressor],
    op: Any,
    factors: tuple[float, float],
    process_set: ProcessSet,
    grouped: bool = False,
) -> list[torch.Tensor]:
    """Reduce and scatter tensors. The gradient is gathered from the rows' gradients on all members."""

    def run(given: Tensors) -> Tensors:
        return compressed(
            compression, lambda small: _start(small, name, op, process_set, factors, grouped).wait(), given
        )

    def back(gradients: Tensors) -> Tensors:
        factor = factors[0] * factors[1] * (len(process_set.ranks) if op == Sum else 1)
        return grouped_allgather([one * factor for one in gradients], process_set=process_set)

    return differentiated(run, back, tensors)
