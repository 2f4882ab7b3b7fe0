"""Digest of a few samples, to check that all workers hold the same data.

A data set of a user-defined class is not read, because reading may draw random numbers, open files, or take long.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import PurePath
from typing import Any

import numpy
import torch
from torch.utils.data import Subset, TensorDataset

from paceline.data.growing.samples import Growing
from paceline.data.nested import leaves_in
from paceline.data.recurrent.token_rows import TokenRows
from paceline.data.streams.reader import digest
from paceline.data.tables.parquet import ParquetDataset

_SAMPLES = 8
_PLAIN = frozenset((torch.Tensor, numpy.ndarray, bool, int, float))


def facts_of(data: Any, *, exact: bool) -> dict[str, object]:
    """Return values of the data that must be equal on all workers, besides the number of samples.

    Args:
        exact: whether to compare every bit of floating-point values. If False, only which values are large is compared,
            because normalized data may differ in the last bits on another processor.
    """
    if isinstance(data, Growing):
        return facts_of(data.initial, exact=exact) if len(data.initial) else {}
    if isinstance(data, ParquetDataset):
        return {"data fingerprint": data.fingerprint[:16]}
    if type(data) is not Subset and not _is_stored(data):
        return {}
    numbers = compared(len(data))
    found = digest_of([_sample(data, number) for number in numbers], exact=exact)
    return {f"data samples {', '.join(map(str, numbers))}": found}


def compared(length: int) -> list[int]:
    """Return the numbers of the samples that stand for a data set: the first, the last and up to 6 between them."""
    return sorted({(length - 1) * place // (_SAMPLES - 1) for place in range(_SAMPLES)})


def digest_of(given: list[Any], *, exact: bool) -> str:
    """Return a hash of samples; ``exact`` as in :func:`facts_of`."""
    samples = [[_plain(leaf) for leaf in leaves_in(one)] for one in given]
    if not exact:
        floating = [[_values(leaf) for leaf in leaves if _is_floating(leaf)] for leaves in samples]
        samples = [[leaf for leaf in leaves if not _is_floating(leaf)] for leaves in samples]
        samples += [[_large(values) for values in found] for found in floating]
        for field in zip(*floating, strict=False):  # scalars are large only compared with those of other samples
            samples.append([_large(numpy.array([one.item() for one in field if one.size == 1]))])
    return digest(samples)


def bits_of(sample: Any) -> str:
    """Return a hash of every bit of a sample."""
    plain = type(sample) in (tuple, list) and all(type(one) in _PLAIN and not _is_odd(one) for one in sample)
    return digest(sample) if plain else digest_of([sample], exact=True)  # the same in a third of the time


def roundings_of(sample: Any) -> list[tuple[str, ...]]:
    """Return pairs of digests of a sample, without the last bits of its floating-point values.

    Samples that differ only by rounding errors have equal lengths, and in each place a digest in common: of a size and
    of a sum of each tensor, rounded to multiples of 0.001, and to those halfway between them.
    """
    leaves = [_plain(leaf) for leaf in leaves_in(sample)]
    found: list[tuple[str, ...]] = [(digest([leaf for leaf in leaves if not _is_floating(leaf)]),)]
    for values in (_values(leaf).ravel() for leaf in leaves if _is_floating(leaf)):
        odd = ~numpy.isfinite(values)
        found.append((digest([odd.tobytes(), str(values[odd].tolist())]),))
        values = numpy.where(odd, 0.0, values)
        largest = float(numpy.abs(values).max(initial=0.0)) or 1.0  # whose square may overflow
        size = (float(numpy.linalg.norm(values / largest)) or 1.0) * largest
        weights = numpy.random.default_rng(len(values)).random(len(values)) + 0.5
        for number in (math.log(size), float(values @ weights) / size):
            found.append(tuple(digest([len(values), math.floor(number * 1000 + half)]) for half in (0.0, 0.5)))
    return found


def _sample(data: Any, number: int) -> Any:
    """Return a sample, for a subset with its index in the data set. Return None if it cannot be read safely."""
    if type(data) is Subset:
        origin = data.indices[number]
        return origin, _sample(data.dataset, origin)
    if _is_stored(data):
        with contextlib.suppress(IndexError):  # a wrong index in a subset is reported when the sample is loaded
            return data[number]
    return None


def _is_stored(data: Any) -> bool:
    """Return whether reading a sample has no side effects."""
    return type(data) in (TensorDataset, TokenRows, list, tuple, range) or isinstance(
        data, torch.Tensor | numpy.ndarray
    )


def _plain(leaf: Any) -> Any:
    """Return the name of an absolute path, None for a meta, nested or quantized tensor, and any other leaf itself."""
    if isinstance(leaf, str | PurePath):
        return PurePath(leaf).name if PurePath(leaf).is_absolute() else str(leaf)
    return None if _is_odd(leaf) else leaf


def _is_odd(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_meta or leaf.is_nested or leaf.is_quantized)


def _is_floating(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.layout == torch.strided and leaf.is_floating_point()
    if isinstance(leaf, numpy.ndarray):
        return bool(leaf.dtype.kind == "f")
    return isinstance(leaf, float | numpy.floating)


def _values(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu().double().resolve_neg().numpy()
    return numpy.asarray(leaf, numpy.float64)


def _large(values: Any) -> Any:
    """Return which values lie in the upper part of their range. The bound, 0.618, is not near any usual value."""
    if values.size == 0:
        return values
    with numpy.errstate(all="ignore"):
        return values > values.min() + (values.max() - values.min()) * 0.6180339887
