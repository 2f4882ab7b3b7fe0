"""Whether all workers hold the same data: what some samples are, as far as that can be seen without side effects.

A data set of the script's own class is not read here: it may draw random numbers, open files, or take long.
"""

from __future__ import annotations

import contextlib
from pathlib import PurePath
from typing import Any

import numpy
import torch
from torch.utils.data import Subset, TensorDataset

from paceline.data.nested import leaves_in
from paceline.data.recurrent.token_rows import TokenRows
from paceline.data.streams.reader import digest
from paceline.data.tables.parquet import ParquetDataset

_SAMPLES = 8


def facts_of(data: Any, *, exact: bool) -> dict[str, object]:
    """What all workers must agree on of the data, besides the number of samples.

    Args:
        data: as it was given to ``start``.
        exact: whether every bit of floating-point values counts. Else only which of them are large: a script that
            normalizes its data may get other last bits on another processor.
    """
    if isinstance(data, ParquetDataset):
        return {"data fingerprint": data.fingerprint[:16]}
    if type(data) is not Subset and not _is_plain(data):
        return {}
    last = len(data) - 1
    numbers = sorted({last * place // (_SAMPLES - 1) for place in range(_SAMPLES)})
    samples = [[_seen(leaf, exact) for leaf in leaves_in(_sample(data, number))] for number in numbers]
    return {f"data samples {', '.join(map(str, numbers))}": digest(samples)}


def _sample(data: Any, number: int) -> Any:
    """A sample; of a subset with its number, of what cannot be seen nothing."""
    if type(data) is Subset:
        origin = int(data.indices[number])
        return origin, _sample(data.dataset, origin)
    if _is_plain(data):
        with contextlib.suppress(IndexError):  # of a subset; reading it says so later
            return data[number]
    return None


def _is_plain(data: Any) -> bool:
    """Whether reading a sample does nothing else."""
    return type(data) in (TensorDataset, TokenRows, list, tuple) or isinstance(data, torch.Tensor | numpy.ndarray)


def _seen(leaf: Any, exact: bool) -> Any:
    if isinstance(leaf, str | PurePath):  # files may be in another folder on each machine
        return PurePath(leaf).name
    if exact or not _is_floating(leaf):
        return leaf
    values = torch.as_tensor(leaf).detach().double()
    return values > (values.max() + values.min()) / 2


def _is_floating(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.is_floating_point() and leaf.layout == torch.strided and leaf.numel() > 0
    if isinstance(leaf, numpy.ndarray):
        return leaf.dtype.kind == "f" and leaf.size > 0
    return isinstance(leaf, float | numpy.floating)
