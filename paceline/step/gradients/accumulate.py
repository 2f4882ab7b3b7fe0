"""Sums of gradient lists over microbatches, along the canonical tree or as a running sum."""

from __future__ import annotations

from typing import TypeAlias

import torch

from paceline.comm.reduction.division import Divisor, divide_all
from paceline.comm.reduction.narrow import FLOAT8, add_
from paceline.comm.shm.tensors import CACHE_LINE
from paceline.schedule.tree import Node, first_of, merges, parent_of, sibling_of, total
from paceline.settings import Exact
from paceline.system.torch_internals import foreach_add_

Values: TypeAlias = "list[torch.Tensor | None]"
"""One tensor for each parameter. None if the microbatch gives no gradient."""


def add(left: Values, right: Values) -> Values:
    """Add ``right`` into ``left`` and return the sum: dense values in place. None counts as a missing summand."""
    sums = [now if before is None else before for before, now in zip(left, right, strict=True)]
    both = [(before, now) for before, now in zip(left, right, strict=True) if before is not None and now is not None]
    if any(before.is_sparse for before, _ in both):
        for place, (before, now) in enumerate(zip(left, right, strict=True)):
            if before is not None and now is not None and before.is_sparse:
                sums[place] = (before + now).coalesce()
        both = [pair for pair in both if not pair[0].is_sparse]
    together = [pair for pair in both if pair[0].dtype not in FLOAT8]
    if together:
        foreach_add_([before for before, _ in together], [now for _, now in together])
    for before, now in both if len(together) < len(both) else ():
        if before.dtype in FLOAT8:
            add_(before, now)
    return sums


def divided(nodes: list[Node], sums: list[Values], divisor: Divisor) -> Values:
    """Return the means from the sums of a single worker, which holds these nodes."""
    means = total(list(zip(nodes, sums, strict=True)) or [(Node(0, 0), [])], add)
    given = [value for value in means if value is not None]
    if given and (isinstance(divisor, torch.Tensor) or divisor != 1.0):
        divide_all(given, divisor)
    return means


def align_value(value: torch.Tensor | None) -> torch.Tensor | None:
    """Return the value at the start of a cache line, where the reductions over several workers put it too.

    Matrix products of an optimizer may round differently at other addresses. If a parameter was concatenated with
    others, the backward pass gives it a slice of a larger tensor. Sparse and aligned tensors are returned unchanged.
    """
    if value is None or value.is_sparse or value.data_ptr() % CACHE_LINE == 0:
        return value
    return value.clone()


class Accumulator:
    """Accumulator for microbatches that arrive in any order.

    With ``exact`` it keeps one sum for each complete node of the canonical tree (``schedule.tree.nodes_of``), if
    microbatches arrive from left to right at most one for each level. Otherwise it keeps a single running sum in order
    of arrival.
    """

    def __init__(self, exact: Exact) -> None:
        self._exact = exact
        self._held: dict[Node, Values] = {}

    def push(self, microbatch: int, values: Values) -> None:
        node = Node(0, microbatch)
        if self._held and not self._exact:
            node, before = self._held.popitem()
            values = add(before, values)
        while self._exact and (other := self._held.pop(sibling_of(node), None)) is not None:
            values = add(other, values) if node.place % 2 else add(values, other)
            node = parent_of(node)
        self._held[node] = values

    def before_last(self, microbatch: int) -> tuple[list[Values], list[Values]]:
        """Return the sums that are complete before the last microbatch is pushed. All others came before it in order.

        Returns:
            the sums of nodes that pushing ``microbatch`` leaves unchanged, from left to right, and the sums to which it
            will be added, nearest first.
        """
        merged = merges(sorted(self._held, key=first_of), Node(0, microbatch)) if self._exact else len(self._held)
        values = self.values()
        kept = len(values) - merged
        return values[:kept], values[kept:][::-1]

    def nodes(self) -> list[tuple[Node, Values]]:
        """Return the tree nodes with their sums, from left to right. Without ``exact``, the node is the first leaf."""
        return [(node, self._held[node]) for node in sorted(self._held, key=first_of)]

    def values(self) -> list[Values]:
        """Return the sums, ordered by their first microbatch."""
        return [values for _, values in self.nodes()]

    def total(self) -> Values:
        """Return the sum over all microbatches. This worker must have computed all of them."""
        return total(self.nodes(), add)
