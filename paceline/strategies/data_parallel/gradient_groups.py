"""Groups of parameters whose gradients are passed to a reduction together, and the copies into its buckets.

::

    buckets    [ p5 | p4 | p3 ]    [ p2 | p1[0:64] ]    [ p1[64:128] | p0 ]
    groups       p5, p4, p3          p2 | p1                           p0

The hook of a parameter only counts, because the backward pass waits for it. The last gradient of a group takes them
all: one check, one encoding and one copy into the bucket, which could not be sent earlier anyway. A parameter that is
cut into slices is a group of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from paceline.comm.reduction.narrow import add
from paceline.schedule.slices import Slice
from paceline.step.gradients.accumulate import Values
from paceline.step.gradients.codec import Codec
from paceline.system.torch_internals import foreach_copy_

Piece: TypeAlias = "tuple[list[int], list[tuple[Values, Values | None]]]"
"""Indices of tensors in one bucket of the reduction, and for each node, one or two values to add up for each tensor."""


class Slices(NamedTuple):
    """Slices of the parameters that a reduction reduces to different workers, in its order."""

    encoded: Sequence[Slice]  # elements of the sums that stand for each slice
    codec: Codec | None = None  # codec of the gradients. None if they are added up as they are.


@dataclass(frozen=True)
class GradientGroup:
    """Parameters whose gradients are passed to a reduction together."""

    places: list[int]  # indices of the parameters
    members: list[int]  # indices of their tensors in the reduction
    # elements of each tensor if the group is one parameter that is cut. Empty if the parameters are whole.
    parts: list[slice] = field(default_factory=list)
    # indices of the parameters, in the order of their gradients in this backward pass
    arrived: list[int] = field(default_factory=list)

    def cut(self, values: Values) -> Values:
        """Return the value for each tensor of the reduction, given the value for each parameter."""
        if not self.parts:
            return values
        (value,) = values
        return [None if value is None else value.reshape(-1)[part] for part in self.parts]

    def pieces(self, sums: Sequence[tuple[Values, Values | None]]) -> list[Piece]:
        """Return the pieces that each go into one bucket: all tensors together, or each one if the parameter is cut.

        Args:
            sums: for each node of this worker, one or two values to add up for each tensor.
        """
        if not self.parts:
            return [(self.members, [*sums])]
        return [
            ([member], [(left[at : at + 1], right and right[at : at + 1]) for left, right in sums])
            for at, member in enumerate(self.members)
        ]


def groups_of(slices: Sequence[Slice], buckets: Sequence[Sequence[int]]) -> list[GradientGroup]:
    """Return the groups of all parameters, in the order of the buckets.

    Args:
        slices: slice that each tensor of the reduction holds.
        buckets: indices of the tensors of each bucket.
    """
    tensors: dict[int, list[int]] = defaultdict(list)
    for member, one in enumerate(slices):
        tensors[one.parameter].append(member)
    groups = []
    for bucket in buckets:
        if whole := [member for member in bucket if len(tensors[slices[member].parameter]) == 1]:
            groups.append(GradientGroup([slices[member].parameter for member in whole], whole))
        for place in dict.fromkeys(slices[member].parameter for member in bucket):
            members = tensors[place]
            if len(members) > 1 and members[0] in bucket:
                parts = [slice(slices[member].start, slices[member].stop) for member in members]
                groups.append(GradientGroup([place], members, parts))
    return groups


def put(slots: list[torch.Tensor], left: Values, right: Values | None = None) -> None:
    """Fill slots with sums, or with -0.0 without values: adding it changes nothing, not even the sign of a zero."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for slot, before, now in zip(slots, left, [None] * len(slots) if right is None else right, strict=True):
        if before is not None and now is not None:
            add(before, now, slot)
        elif (value := now if before is None else before) is not None:
            copies.append((slot, value))
        else:
            slot.fill_(-0.0)
    if copies:
        foreach_copy_([slot for slot, _ in copies], [value for _, value in copies])


def filled(
    buckets: Sequence[list[int]], slots_of: Callable[[list[int]], list[list[torch.Tensor]]], sums: list[Values]
) -> Iterator[list[int]]:
    """Write the sums of one bucket after another into its slots, and yield the indices of its tensors."""
    for members in buckets:
        for slots, values in zip(slots_of(members), sums, strict=True):
            put(slots, [values[member] for member in members])
        yield members
