"""Buffers for MPI: tensors packed contiguously, with a type that MPI supports.

Tensors that are only moved are sent as integers of the same size, whatever their type. Tensors that are reduced keep
their type, except for float16 and bfloat16, which MPI lacks and which become float32, and booleans, which become uint8.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from paceline.comm.mpi.library import initialized

Operator: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"

_MOVED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_ADDED = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.uint8}
_NAMES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
}
_OPERATIONS = {
    "SUM": "SUM",
    "AVG": "SUM",
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}
_OF_TRUTH = {"SUM": "MAX", "PRODUCT": "MIN"}


class Move:
    """Tensors whose bytes are moved, packed in one block of memory.

    Args:
        written: whether MPI writes into the tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], written: bool = False) -> None:
        self._tensors = [one.detach() for one in tensors]
        self._written = written
        parts = [_as_numbers(one) for one in self._tensors]
        self.counts = [one.numel() for one in parts]
        self.starts = [0, *accumulate(self.counts)][:-1]
        self._flat = parts[0] if len(parts) == 1 else torch.cat(parts)

    def block(self) -> list[Any]:
        """Return the block in the form that mpi4py expects."""
        return whole(self._flat)

    def parts(self) -> list[Any]:
        """Return the block in the form that mpi4py expects, with one part for each tensor."""
        block, kind = whole(self._flat)
        return [block, self.counts, self.starts, kind]

    def deliver(self) -> None:
        """Copy the received data into the tensors that MPI has not written directly."""
        for tensor, start, count in zip(self._tensors, self.starts, self.counts, strict=True):
            part = self._flat[start : start + count]
            if self._written and part.data_ptr() != tensor.data_ptr():
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


class Reduction:
    """Tensors whose elements are reduced over the workers, packed in one block of memory.

    Args:
        tensors: tensors of one type, in the order of the block.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], operation: Operator) -> None:
        self.operation = _name_of(operation)
        dtype = tensors[0].dtype
        self._dtype = _ADDED.get(dtype, dtype)
        if {one.dtype for one in tensors} != {dtype}:
            raise ValueError(f"tensors of one type are reduced together, not {[one.dtype for one in tensors]}")
        if self._dtype not in _NAMES or (self.operation == "AVG" and not (dtype.is_floating_point or dtype.is_complex)):
            raise ValueError(f"MPI does not reduce {dtype} by {self.operation}")
        parts = [_one_after_another(one).to(self._dtype) for one in tensors]
        self.flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._truth = dtype == torch.bool

    def block(self) -> list[Any]:
        """Return the block in the form that mpi4py expects."""
        return whole(self.flat)

    def op(self) -> Any:
        name = _OF_TRUTH.get(self.operation) if self._truth else None
        return getattr(initialized(), name or _OPERATIONS[self.operation])

    def room(self, elements: int) -> torch.Tensor:
        """Return an uninitialized buffer for this number of results."""
        return torch.empty(elements, dtype=self._dtype)

    def deliver(self, result: torch.Tensor, tensors: Sequence[torch.Tensor], workers: int) -> None:
        """Copy the consecutive results, divided for an average, into the tensors that do not hold them already."""
        if self.operation == "AVG":
            result.div_(workers)
        start = 0
        for tensor in tensors:
            part = result[start : start + tensor.numel()]
            if part.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(part.view(tensor.shape))
            start += tensor.numel()


def whole(tensor: torch.Tensor) -> list[Any]:
    """Return a contiguous tensor in the form that mpi4py expects."""
    return [tensor.numpy(), getattr(initialized(), _NAMES[tensor.dtype])]


def _one_after_another(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or not tensor.is_cpu:
        raise ValueError(f"MPI moves dense tensors on the CPU, not {tensor.layout} ones on {tensor.device}")
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return _one_after_another(tensor).view(_MOVED[tensor.element_size()])


def _name_of(operation: Operator) -> str:
    for name in _OPERATIONS:
        if operation == getattr(dist.ReduceOp, name):
            return name
    raise ValueError(f"MPI has no reduction {operation}")
