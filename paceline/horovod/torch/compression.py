"""Fewer bytes on the way: gradients in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Compressor:
    """Leaves tensors as they are; others override :attr:`dtype`."""

    dtype: torch.dtype | None = None
    """On the way; None: that of the tensor."""

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Convert a tensor of floating point; gives it with the type that it had."""
        if cls.dtype is None or not tensor.dtype.is_floating_point:
            return tensor, tensor.dtype
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """Convert it back to the type that it had."""
        return tensor if cls.dtype is None else tensor.to(ctx)


def compress_all(
    compression: type[Compressor], tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    """Compress tensors; what is no tensor, which is refused later, stays as it is."""
    pairs = [compression.compress(one) if isinstance(one, torch.Tensor) else (one, torch.float32) for one in tensors]
    return [small for small, _ in pairs], [context for _, context in pairs]


class NoneCompressor(Compressor):
    """No compression."""


class FP16Compressor(Compressor):
    """float16, which has 3 digits, and numbers up to 65,504."""

    dtype = torch.float16


class BF16Compressor(Compressor):
    """bfloat16, which has 2 digits, and the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """The compressions to choose from.

    Example:
        >>> import torch
        >>> small, ctx = Compression.fp16.compress(torch.ones(2))
        >>> small.dtype, Compression.fp16.decompress(small, ctx).dtype
        (torch.float16, torch.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
