"""Digests of a microbatch that is computed twice: of its data, loss, buffers and gradients."""

from __future__ import annotations

import hashlib
import math
from typing import Any, TypeAlias

import torch

from paceline.checkpoint.tensors import raw_bytes
from paceline.data.nested import leaves_in
from paceline.step.replicas import digest_at

TOLERANCE = 1e-2
"""Largest difference relative to the norm of a value, if the bits may differ."""
TOLERANCE_LOW = 5e-2
"""The same where values are rounded to float16 or bfloat16 at other places."""

_PART = 1 << 20  # even number of elements that torch, which copies what it adds up in float64, copies together

Found: TypeAlias = "dict[str, list[int | float]]"
"""Maps the name of a value to its digest, then, without ``exact``, its norm and its sum with alternating signs."""

DATA = "the data"


class Digests:
    """Digests of values, by name. Digests of values on an accelerator are read when :meth:`found` is called.

    Args:
        exact: whether all bits must be equal. Otherwise values may differ by rounding.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._sums: dict[str, list[int | torch.Tensor]] = {}

    def add_data(self, data: Any) -> None:
        """Add the digest of a batch, over the bytes of its tensors and the text of plain values."""
        digest = hashlib.blake2b(digest_size=6)
        for leaf in leaves_in(data):
            if isinstance(leaf, torch.Tensor):
                digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
                for part in _strided(leaf.detach()):
                    flat = part.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
                    digest.update(raw_bytes(flat))
            elif isinstance(leaf, bool | int | float | str | None):
                digest.update(repr(leaf).encode())
        self._sums[DATA] = [int.from_bytes(digest.digest(), "little")]

    def add(self, name: str, value: torch.Tensor) -> None:
        """Add the digest of a tensor."""
        value = value.detach()
        if value.is_sparse:
            value = value.coalesce().values()
        self._sums[name] = [digest_at(value)]
        if not self._exact:
            flat = (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).flatten()
            flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
            signs = torch.zeros((), dtype=torch.float64, device=flat.device)
            for part in flat.split(_PART):
                signs += part[::2].sum(dtype=torch.float64) - part[1::2].sum(dtype=torch.float64)
            self._sums[name] += [torch.linalg.vector_norm(flat), signs]

    def found(self) -> Found:
        """Return the digests as numbers."""
        return {
            name: [one if isinstance(one, int) else one.item() for one in sums] for name, sums in self._sums.items()
        }


def difference(found: list[tuple[int, Found]], tolerance: float = TOLERANCE) -> tuple[str, tuple[int, int]]:
    """Return the first value whose digests differ between two workers, and their ranks. The name is empty if all agree.

    Args:
        found: pairs of a rank and its digests.
        tolerance: largest difference relative to the norm of a value, if the bits may differ.
    """
    for rank, digests in found[1:]:
        first, known = found[0]
        for name in known:  # gradients may be missing if another worker has stolen the microbatch
            if name in digests and not _alike(known[name], digests[name], tolerance):
                return name, (first, rank)
    return "", (0, 0)


def _alike(left: list[int | float], right: list[int | float], tolerance: float) -> bool:
    if left[0] == right[0] or len(left) == 1:
        return left[0] == right[0]
    if not all(map(math.isfinite, left + right)):
        return True  # other checks report NaN and infinity
    return all(abs(one - other) <= tolerance * left[1] for one, other in zip(left[1:], right[1:], strict=True))


def _strided(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the numbers of a tensor of any layout as strided tensors, or an empty list if torch cannot convert it."""
    if value.is_nested:
        return [part for one in value.unbind() for part in _strided(one)]
    if value.layout == torch.strided:
        return [value]
    try:
        return [value.to_dense()]
    except RuntimeError:
        return []
