"""Validation of an operation's arguments, and their conversion to a request for the engine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from paceline.horovod.engine.engine import Engine
from paceline.horovod.engine.handle import Handle
from paceline.horovod.engine.operations import Task
from paceline.horovod.engine.requests import GLOBAL, REFUSED, Request
from paceline.horovod.errors import InvalidRequest, NotInitialized
from paceline.horovod.process_sets import ProcessSet
from paceline.horovod.runtime import engine

DTYPES = frozenset(["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"])
_REFUSED_SECONDS = 5.0
"""Timeout for a refused request to end, so that a later request of the same name is not mistaken for it."""


class Reduction(str):
    """Reduction operator, a string that equals its name."""


Average, Sum, Adasum = Reduction("Average"), Reduction("Sum"), Reduction("Adasum")
Min, Max, Product = Reduction("Min"), Reduction("Max"), Reduction("Product")
REDUCTIONS = (Average, Sum, Adasum, Min, Max, Product)


def reduction_of(op: Any, average: bool | None) -> Reduction:
    """Return the reduction for ``op``, or for ``average`` in scripts for Horovod before 0.19. Defaults to Average.

    Raises:
        ValueError: both are given, or ``op`` is not a reduction.
    """
    if op is not None and average is not None:
        raise ValueError("Give op or average, not both: op replaces average.")
    if average is not None:
        warnings.warn("average is deprecated: give op=hvd.Average or op=hvd.Sum.", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    if op is not None and op not in REDUCTIONS:
        raise ValueError(f"op={op!r}: give one of hvd.{', hvd.'.join(REDUCTIONS)}.")
    return Average if op is None else Reduction(op)


def submit(
    kind: str,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor | None],
    name: str | None,
    process_set: ProcessSet,
    grouped: bool = False,
    wrong: str = "",
    **values: Any,
) -> Handle:
    """Submit an operation on these tensors to the engine. Grouped operations have a separate name prefix.

    Args:
        wrong: error in other arguments, if any.

    Raises:
        InvalidRequest: the tensors cannot be used. The other members raise an error, too.
        NotInitialized: ``init`` was not called, or the process set is not added.
    """
    called = f"{'grouped_' * grouped}{kind}.{name}" if name else ""  # the engine replaces it by a counter
    words = Request(GLOBAL, called, kind).words
    running = engine(words)
    number = _number_of(process_set, f"Rank {running.rank}: {words}: ")
    if strange := [type(one).__name__ for one in tensors if not isinstance(one, torch.Tensor)]:
        _refuse(running, Request(number, called, kind), f"a {strange[0]} was given, not a tensor.")
    request = Request(
        number,
        called,
        kind,
        tuple(str(one.dtype).removeprefix("torch.") for one in tensors),
        tuple(tuple(one.shape) for one in tensors),
        **values,
    )
    if wrong := wrong or _wrong(request, tensors, process_set.ranks):
        _refuse(running, request, wrong)
    handle = running.submit(request, Task(list(tensors), list(outputs)))
    handle.single = len(outputs) == 1 and not grouped
    return handle


def _number_of(process_set: Any, who: str) -> int:
    """Return the ID of a process set. ``who`` begins error messages."""
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequest(f"{who}process_set={process_set!r}: give a ProcessSet, as hvd.add_process_set returns it.")
    if process_set.process_set_id is None:
        raise NotInitialized(f"{who}{process_set} is not added: give it to hvd.init or hvd.add_process_set.")
    return process_set.process_set_id


def _refuse(running: Engine, request: Request, why: str) -> None:
    """Make the request fail on the other members with the reason ``why``, and raise InvalidRequest."""
    refused = Request(request.set, request.name, REFUSED, detail=why)
    running.submit(refused, Task([], [])).wait_for(_REFUSED_SECONDS)
    raise InvalidRequest(f"Rank {running.rank}: {request.words}: {why}")


def _wrong(request: Request, tensors: Sequence[torch.Tensor], ranks: Sequence[int]) -> str:
    for tensor in tensors:
        if text := _wrong_tensor(request, tensor):
            return text
    if request.kind == "broadcast" and request.root not in ranks:
        return f"root rank {request.root} is none of the ranks {ranks}."
    if request.kind == "alltoall":
        rows = tensors[0].shape[0]
        if len(request.splits) != len(ranks) or min(request.splits) < 0 or sum(request.splits) > rows:
            return f"splits {list(request.splits)} do not divide {rows} rows among {len(ranks)} members."
    return ""


def _wrong_tensor(request: Request, tensor: torch.Tensor) -> str:
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES or tensor.layout != torch.strided:
        return f"a tensor of type {tensor.dtype} and layout {tensor.layout} is not supported."
    if tensor.is_meta:
        return "a tensor on the meta device has no values."
    if tensor.dtype == torch.bool and request.op == Average:
        return "there is no mean of truth values: give op=hvd.Sum, hvd.Min or hvd.Max."
    if not tensor.is_contiguous():
        return f"a tensor of shape {list(tensor.shape)} is not contiguous: give tensor.contiguous()."
    if request.kind in ("allgather", "alltoall", "reducescatter") and tensor.dim() == 0:
        return "the tensor has no dimension: it needs a first one."
    return ""
