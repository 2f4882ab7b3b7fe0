"""Slices of the parameters, each owned by one worker, which keeps its optimizer state and makes its update.

::

    bucket of 3 parameters on 3 workers    [ p7 ──────── | p6 ─────────────── | p5 ── ]
    slices                                 [ rank 0      | rank 1      | rank 2      ]
                                             p7, p6[0:64]  p6[64:1088]   p6[1088:], p5

Cuts lie at multiples of :data:`BLOCK` elements from the start of a parameter. An update of torch's element-wise
optimizers gives a block the same bits wherever the slice begins, because no vectorized loop treats it as a remainder.
A parameter that must stay whole has one owner.

The state that a worker owns is named by parameters and buffers, or by slices: ``name[start:stop]``. A slice also stands
for the same slice of each optimizer state that has the parameter's shape.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

BLOCK = 64  # Number of elements in a block. With torch 2.13, slices of 32 gave the same bits, shorter ones did not.
STAGES = {"optimizer": 1, "gradients": 2, "parameters": 3}
"""Stage of ZeRO for each value of the setting ``shard`` (Rajbhandari et al. 2020, arXiv 1910.02054)."""

_SLICE = re.compile(r"(.*)\[(\d+):(\d+)\]")


class Slice(NamedTuple):
    """Elements ``start`` to ``stop`` of the flattened parameter at index ``parameter``, owned by a rank.

    ``row``: number of elements at whose multiples a table with sparse gradients is cut, otherwise 0.
    """

    parameter: int
    start: int
    stop: int
    owner: int
    row: int = 0


def whole(sizes: Sequence[int], workers: int) -> list[Slice]:
    """Give each parameter to one worker, largest first, each to the worker with the fewest elements.

    >>> whole([10, 40, 30], 2)
    [Slice(parameter=0, start=0, stop=10, owner=1, row=0), Slice(parameter=1, start=0, stop=40, owner=0, row=0), \
Slice(parameter=2, start=0, stop=30, owner=1, row=0)]
    """
    loads, owner = [0] * workers, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        owner[index] = loads.index(min(loads))
        loads[owner[index]] += max(sizes[index], 1)
    return [Slice(index, 0, size, owner[index]) for index, size in enumerate(sizes)]


def even(sizes: Sequence[int], runs: Sequence[Sequence[int]], workers: int) -> list[Slice]:
    """Cut each run of parameters into one part for each worker, of equal size up to a block.

    Args:
        runs: indices of the parameters that are reduced together, in the order in which their gradients are computed.

    Returns:
        slices in the order of the runs.

    >>> even([1000, 64], [[0, 1]], 2)
    [Slice(parameter=0, start=0, stop=512, owner=0, row=0), Slice(parameter=0, start=512, stop=1000, owner=1, row=0), \
Slice(parameter=1, start=0, stop=64, owner=1, row=0)]
    """
    slices = []
    for run in runs:
        total, before = sum(sizes[index] for index in run), 0
        for index in run:
            ends = [_block(total * (rank + 1) // workers - before, sizes[index]) for rank in range(workers - 1)]
            cuts = [0, *ends, sizes[index]]
            found = [Slice(index, cuts[rank], cuts[rank + 1], rank) for rank in range(workers)]
            slices += [one for one in found if one.start < one.stop] or found[:1]
            before += sizes[index]
    return slices


def rows(tables: Mapping[int, tuple[int, int]], workers: int) -> list[Slice]:
    """Cut tables into a part for each worker, of about the same number of elements.

    Args:
        tables: number of rows, and number of elements of a row, by index of the parameter.

    >>> [one[:4] for one in rows({0: (5, 8), 2: (4, 8)}, 2)]
    [(0, 0, 32, 0), (0, 32, 40, 1), (2, 0, 32, 1)]
    """
    slices = []
    total, before = sum(count * row for count, row in tables.values()), 0
    for parameter, (count, row) in tables.items():
        ends = [(total * (rank + 1) // workers - before) // row for rank in range(workers - 1)]
        cuts = [0, *(min(max(end, 0), count) * row for end in ends), count * row]
        slices += [
            Slice(parameter, start, stop, rank, row)
            for rank, (start, stop) in enumerate(pairwise(cuts))
            if start < stop
        ]
        before += count * row
    return slices


def large(sizes: Sequence[int], workers: int) -> list[int]:
    """Return the indices of the parameters that are larger than an equal share of all.

    >>> large([50, 40, 30], 3)
    [0]
    """
    return [index for index, size in enumerate(sizes) if size * workers > sum(sizes)]


def partly_cut(sizes: Sequence[int], cut: Collection[int], workers: int) -> list[Slice]:
    """Cut some parameters into a part for each worker, and give each other parameter to one worker.

    >>> partly_cut([128, 8, 6], [0], 2)
    [Slice(parameter=0, start=0, stop=64, owner=0, row=0), Slice(parameter=0, start=64, stop=128, owner=1, row=0), \
Slice(parameter=1, start=0, stop=8, owner=0, row=0), Slice(parameter=2, start=0, stop=6, owner=1, row=0)]
    """
    parts = {index: even(sizes, [[index]], workers) for index in cut}
    rest = whole([0 if index in parts else size for index, size in enumerate(sizes)], workers)
    return [part for one in rest for part in parts.get(one.parameter, [one])]


def _block(at: int, size: int) -> int:
    """Round a cut to the nearest block boundary within a parameter."""
    return min(max(round(at / BLOCK), 0) * BLOCK, size)


def covers(ranges: Sequence[tuple[int, int]], size: int) -> bool:
    """Return whether ranges cover all elements of a parameter."""
    end = 0
    for start, stop in sorted(ranges):
        if start > end:
            return False
        end = max(end, stop)
    return end >= size


def slice_name(name: str, start: int, stop: int) -> str:
    """Return the name of a slice.

    >>> slice_name("head.weight", 0, 64)
    'head.weight[0:64]'
    """
    return f"{name}[{start}:{stop}]"


def split_name(owned: str) -> tuple[str, slice | None]:
    """Return the name of the parameter or buffer, and the slice of its elements. None stands for all of them.

    >>> split_name("head.weight[0:64]"), split_name("head.bias")
    (('head.weight', slice(0, 64, None)), ('head.bias', None))
    """
    found = _SLICE.fullmatch(owned)
    return (found[1], slice(int(found[2]), int(found[3]))) if found else (owned, None)


def of_size(part: slice, size: int, whole: int) -> slice:
    """Return the elements of a tensor that belong to a part of one with ``whole`` elements, which has as many rows.

    >>> of_size(slice(8, 24), size=5, whole=40)
    slice(1, 3, None)
    """
    return part if size == whole else slice(part.start * size // whole, part.stop * size // whole)


def not_owned(sizes: Mapping[str, int], owned: Iterable[str]) -> list[str]:
    """Return the sorted names of parameters and buffers that are not owned, or not in all their elements.

    Args:
        owned: names and slices owned by any worker.
    """
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    complete = set()
    for one in owned:
        name, part = split_name(one)
        if part is None:
            complete.add(name)
        else:
            ranges[name].append((part.start, part.stop))
    return sorted(
        name
        for name, size in sizes.items()
        if name not in complete and not (ranges[name] and covers(ranges[name], size))
    )
