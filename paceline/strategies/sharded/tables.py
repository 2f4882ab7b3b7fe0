"""Tables of sharded training, whose gradients are sparse: cut by rows, each updated by the owner of the rows.

::

    worker 0   rows 3, 7 ─┐           ┌ owner of rows 0 to 4: update 3    ┐ a machine that has weights of its own
    worker 1   rows 3, 8 ─┴ to owners ┴ owner of rows 5 to 9: update 7, 8 ┴ gets the rows that have changed
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from paceline.comm.collectives.all_gather import AllGather
from paceline.comm.collectives.step_header import UPDATED_TAG
from paceline.comm.transport.base import Message
from paceline.schedule.slices import Slice, slice_name
from paceline.step.context import TrainingContext
from paceline.strategies.data_parallel.sparse_rows import Section

_TAGS = (1 << 26) + (1 << 25)


class Tables:
    """Tables and their sections, of which each worker updates some.

    Args:
        context: training context.
        slices: slices of all parameters, those of tables last.
        copies: ranks that make the same updates as each owner.
        receivers: ranks that get the changed rows of each owner.
        pulled: indices of the slices whose rows the workers pull instead (``sharded.pulled_rows``).

    Attributes:
        first: index of the first slice of a table.
        others: all other parameters, by name.
        slices_of_others: their slices, by index in ``others``.
        sections: slices of the tables, as sections of their gradients.
        pulled: whether workers pull rows of any table.
    """

    def __init__(
        self,
        context: TrainingContext,
        slices: Sequence[Slice],
        copies: Mapping[int, Sequence[int]],
        receivers: Mapping[int, Sequence[int]],
        pulled: Collection[int] = (),
    ) -> None:
        self._world, self.pulled = context.world, bool(pulled)
        named = [*context.update.parameters.items()]
        places = [at for at, (name, _) in enumerate(named) if name in context.sparse]
        others = [at for at in range(len(named)) if at not in places]
        self.others = dict(named[at] for at in others)
        self.slices_of_others = [one._replace(parameter=others.index(one.parameter)) for one in slices if not one.row]
        self.first = len(self.slices_of_others)
        self._slices = slices[self.first :]
        self._receivers = [
            () if self.first + at in pulled else receivers[one.owner] for at, one in enumerate(self._slices)
        ]
        self._names = [named[one.parameter][0] for one in self._slices]
        self._widths = [math.prod(named[one.parameter][1].shape[1:]) for one in self._slices]
        self.sections = [
            Section(
                places.index(one.parameter),
                range(one.start // width, one.stop // width),
                [one.owner, *copies[one.owner]],
            )
            for one, width in zip(self._slices, self._widths, strict=True)
        ]
        sizes = 8 * len(self.sections)
        self._counts = AllGather(context.world, UPDATED_TAG, sizes, host=True) if self.sections else None
        self._narrow = torch.int32 if all(len(one.rows) < 1 << 31 for one in self.sections) else torch.int64
        self._means: dict[int, torch.Tensor] = {}
        self._changed: dict[int, torch.Tensor] = {}

    def begin(self, means: Mapping[int, torch.Tensor | None]) -> None:
        """Take the mean gradients of this worker's sections, which the update may change."""
        given = {at: mean for at, mean in means.items() if mean is not None}
        owned = [at for at in given if self._slices[at].owner == self._world.rank]
        self._changed = {at: given[at].indices()[0].to(self._narrow) for at in owned}
        self._means = {self.first + at: mean for at, mean in given.items()}

    def mean(self, index: int) -> torch.Tensor:
        """Return the mean gradient of a held slice that has one."""
        return self._means[index]

    def spread(
        self, own: Mapping[int, torch.Tensor], targets: Mapping[int, torch.Tensor] | Sequence[torch.Tensor]
    ) -> None:
        """Send the changed rows of the owned slices to the workers that have not seen the update. All call this.

        Args:
            own: values of the held slices, by index.
            targets: memory of the slices that this worker receives, by index.
        """
        if self._counts is None:
            return
        world, changed = self._world, self._changed
        counts = torch.zeros(len(self._slices), dtype=torch.int64)
        for at, rows in changed.items():
            counts[at] = len(rows)
        sends, receives, coming = list[Message](), list[Message](), []
        for at, count in enumerate(self._counts.start(counts).wait().amax(0).tolist()):
            index, tag, owner = self.first + at, _TAGS + 2 * at, self._slices[at].owner
            if count and owner == world.rank:
                values = own[index].detach()[changed[at]]
                for peer in self._receivers[at]:
                    sends += [Message(changed[at], peer, tag), Message(values, peer, tag + 1)]
            elif count and world.rank in self._receivers[at]:
                target = targets[index]
                rows = torch.empty(count, dtype=self._narrow, device=target.device)
                coming.append((target, rows, target.new_empty(count, *target.shape[1:])))
                receives += [Message(rows, owner, tag), Message(coming[-1][2], owner, tag + 1)]
        for transfer in world.start_transfers(sends, receives):
            transfer.wait()
        world.synchronize()
        for target, rows, values in coming:
            target[rows] = values

    def whole_means(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Size]]:
        """Return this worker's part of the mean rows of each table, by name, and the shape of all of them.

        All workers call this. The rows of a table are in order: those of its first section come first.
        """
        if self._counts is None:
            return {}, {}
        own = {at: len(rows) for at, rows in self._changed.items()}
        counts: dict[int, int] = {}
        for one in self._world.gather(own, "step"):
            counts |= one
        parts, shapes, ends = dict[str, torch.Tensor](), dict[str, torch.Size](), dict[str, int]()
        for at, count in sorted(counts.items()):
            name, row, start = self._names[at], self._widths[at], ends.get(self._names[at], 0)
            ends[name] = start + count * row
            shapes[name] = torch.Size([ends[name] // row, row])
            if own.get(at):
                parts[slice_name(name, start, ends[name])] = self._means[self.first + at].values().view(-1)
        return parts, shapes
