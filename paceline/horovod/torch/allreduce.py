"""Reductions to all members: ``allreduce`` and its variants.

``op`` is ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``. The deprecated ``average``
means ``Average`` if true, else ``Sum``. Tensors are multiplied by ``prescale_factor`` before the reduction, and results
by ``postscale_factor``. Integers are multiplied in float64 and truncated toward zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.horovod.engine.handle import Handle
from paceline.horovod.engine.requests import GLOBAL
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.torch.compression import Compression, Compressor, compressed
from paceline.horovod.torch.handles import Tensors, differentiated, like
from paceline.horovod.torch.requests import Adasum, Average, Sum, reduction_of, submit


def _start(
    tensors: Tensors,
    outputs: Tensors,
    name: str | None,
    op: Any,
    factors: tuple[float, float],
    process_set: ProcessSet,
    grouped: bool = False,
) -> Handle:
    if op == Adasum and process_set.process_set_id not in (None, GLOBAL):
        raise NotImplementedError("Adasum is for all workers, not for a process set.")
    values: dict[str, Any] = {"op": str(op), "prescale": float(factors[0]), "postscale": float(factors[1])}
    return submit("allreduce", tensors, outputs, name, process_set, grouped, **values)


def _reduced(
    tensors: Tensors,
    name: str | None,
    compression: type[Compressor],
    op: Any,
    factors: tuple[float, float],
    process_set: ProcessSet,
    grouped: bool = False,
) -> list[torch.Tensor]:
    """Reduce tensors. The gradient is the same reduction of the gradients."""

    def run(given: Tensors) -> Tensors:
        def reduce(small: list[torch.Tensor]) -> list[torch.Tensor]:
            return _start(small, like(small), name, op, factors, process_set, grouped).wait()

        return compressed(compression, reduce, given)

    def back(gradients: Tensors) -> Tensors:
        return _start(gradients, like(gradients), None, op, factors, process_set).wait()

    return differentiated(run, back, tensors)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce` and return a handle for ``poll`` and ``synchronize``."""
    factors = prescale_factor, postscale_factor
    op = reduction_of(op, average)
    return _start([tensor], like([tensor]), name, op, factors, process_set)


def allreduce(  # noqa: PLR0913 - the arguments are Horovod's
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return a tensor reduced over all members.

    Example:
        >>> import torch
        >>> import paceline.horovod.torch as hvd
        >>> hvd.init()
        >>> hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Sum)
        tensor([1., 2.])
        >>> hvd.shutdown()
    """
    factors = prescale_factor, postscale_factor
    return _reduced([tensor], name, compression, reduction_of(op, average), factors, process_set)[0]


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce_` and return a handle for ``poll`` and ``synchronize``."""
    factors = prescale_factor, postscale_factor
    return _start([tensor], [tensor], name, reduction_of(op, average), factors, process_set)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all members, in place."""
    factors = prescale_factor, postscale_factor
    _start([tensor], [tensor], name, reduction_of(op, average), factors, process_set).wait()
    return tensor


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allreduce` and return a handle for ``poll`` and ``synchronize``."""
    factors = prescale_factor, postscale_factor
    op = reduction_of(op, average)
    return _start(tensors, like(tensors), name, op, factors, process_set, grouped=True)


def grouped_allreduce(  # noqa: PLR0913 - the arguments are Horovod's
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors as one operation."""
    factors = prescale_factor, postscale_factor
    return _reduced(tensors, name, compression, reduction_of(op, average), factors, process_set, grouped=True)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allreduce_` and return a handle for ``poll`` and ``synchronize``."""
    factors = prescale_factor, postscale_factor
    op = reduction_of(op, average)
    return _start(tensors, tensors, name, op, factors, process_set, grouped=True)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors as one operation, in place."""
    factors = prescale_factor, postscale_factor
    return _start(tensors, tensors, name, reduction_of(op, average), factors, process_set, grouped=True).wait()


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Any, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to gather the entries of sparse tensors. Return a function that waits for their sum or mean.

    Raises:
        ValueError: ``op`` is neither ``Average`` nor ``Sum``.
    """
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce of {name!r} is for hvd.Average and hvd.Sum, not for {op}.")
    tensor = tensor.coalesce()
    described = f"{op} of a sparse tensor of shape {list(tensor.shape)}"

    def gather(part: str, entries: torch.Tensor) -> Handle:
        given = [entries.contiguous()]
        return submit("allgather", given, [None], f"{name}.{part}", process_set, detail=described)

    indices, values = gather("indices", tensor.indices().t()), gather("values", tensor.values())

    def finish() -> torch.Tensor:
        found = values.results()
        if op == Average:
            found = found / len(process_set.ranks)
        return torch.sparse_coo_tensor(indices.results().t(), found, tensor.shape, check_invariants=False)

    return finish
