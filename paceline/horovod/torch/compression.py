"""Compression of transferred gradients to 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Compressor:
    """Base class, which leaves tensors unchanged. Subclasses override :attr:`dtype`."""

    dtype: torch.dtype | None = None
    """dtype of transferred tensors. None keeps the dtype of each tensor."""

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Convert a floating-point tensor, and return it with its original dtype."""
        if cls.dtype is None or not tensor.dtype.is_floating_point:
            return tensor, tensor.dtype
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """Convert a tensor back to its original dtype ``ctx``."""
        return tensor if cls.dtype is None else tensor.to(ctx)


def compressed(
    compression: type[Compressor],
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Run an operation on compressed tensors. Leave other objects, which the operation refuses, unchanged."""
    pairs = [compression.compress(one) if isinstance(one, torch.Tensor) else (one, torch.float32) for one in tensors]
    found = run([small for small, _ in pairs])
    return [compression.decompress(one, context) for one, (_, context) in zip(found, pairs, strict=True)]


class NoneCompressor(Compressor):
    """No compression."""


class FP16Compressor(Compressor):
    """Compression to float16, with 3 decimal digits and values up to 65,504."""

    dtype = torch.float16


class BF16Compressor(Compressor):
    """Compression to bfloat16, with 2 decimal digits and the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """Available compressors.

    Example:
        >>> import torch
        >>> small, ctx = Compression.fp16.compress(torch.ones(2))
        >>> small.dtype, Compression.fp16.decompress(small, ctx).dtype
        (torch.float16, torch.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
