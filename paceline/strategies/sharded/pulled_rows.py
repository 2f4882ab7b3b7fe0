"""Rows of tables that the machines divide, pulled by the forward passes that need them.

::

    machine 0, rows 0 to 4   main thread   forward: rows 3, 7 ── pull 7 ┐      ┌ row 7 ── loss
    machine 1, rows 5 to 9   a thread                                   └ read ┘
                             main thread   forward, backward, ...

No owner updates its rows before all workers have pushed their gradients, so a pull gets the rows of this step. An owner
may be late with its update before: it answers when it has made as many updates as the worker that asks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, NoReturn

import torch

from paceline.checkpoint.weights.sparse_embedding import SparseEmbedding
from paceline.comm.servers.rpc import Answer, RpcPeers
from paceline.comm.shm.tensors import bytes_of
from paceline.errors import InputError, WorkerLost
from paceline.schedule.slices import Slice
from paceline.step.context import TrainingContext

_OTHER_BYTES = 1 << 20


def pulled_tables(context: TrainingContext) -> dict[int, SparseEmbedding]:
    """Return the tables that the machines divide among themselves, by the index of each of their parameters."""
    if len(context.world.hosts) == 1 or context.settings.shard != "parameters":
        return {}
    places = {id(value): place for place, value in enumerate(context.update.parameters.values())}
    tables = [one for one in context.compute.model.modules() if isinstance(one, SparseEmbedding)]
    found = [one for one in tables if all(id(block) in places for block in one.blocks)]
    return {places[id(block)]: one for one in found for block in one.blocks}


class _Part(NamedTuple):
    """Adjacent rows of a table."""

    start: int  # first of these rows
    place: int  # of their slice
    owner: int
    rows: torch.Tensor | None  # if they are on this machine


class PulledRows:
    """Rows of this machine, which this worker gives to others, and clients for the rows of other machines.

    All workers construct it together.

    Args:
        tables: see :func:`pulled_tables`.
        slices: slices of all parameters.
        local: rows of the slices that are on this machine, by index.
    """

    def __init__(
        self,
        context: TrainingContext,
        tables: Mapping[int, SparseEmbedding],
        slices: Sequence[Slice],
        local: Mapping[int, torch.Tensor],
    ) -> None:
        self._world, self._local = context.world, dict(local)
        values = [*context.update.parameters.values()]
        self._peers = RpcPeers(self._world, 2 * sum(values[place].nbytes for place in tables) + _OTHER_BYTES)
        self._peers.server.serve("rows.pull", self._answer)
        self._changed, self._version = threading.Condition(), -1
        place_of = {id(value): place for place, value in enumerate(values)}
        self._sources: dict[SparseEmbedding, TableRows] = {}
        for table in set(tables.values()):
            parts, first = list[_Part](), 0
            for block in table.blocks:
                own = [(index, one) for index, one in enumerate(slices) if one.parameter == place_of[id(block)]]
                for index, one in sorted(own, key=lambda pair: pair[1].start):
                    parts.append(_Part(first + one.start // table.width, index, one.owner, local.get(index)))
                first += len(block)
            self._sources[table] = TableRows(self, parts, table)

    def enter(self) -> None:
        """Let the tables take their rows from here, once the rows have values."""
        for table, source in self._sources.items():
            table.source = source
        self.advance(0)

    def advance(self, version: int) -> None:
        """Give out the rows after ``version`` updates."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def close(self) -> None:
        """Release the rows, and refuse those that others still wait for."""
        with self._changed:
            self._local.clear()
            self._changed.notify_all()
        for source in self._sources.values():
            source.close()

    def pull(self, wanted: Mapping[int, Mapping[int, torch.Tensor]], like: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return rows of other machines, by index of the slice.

        Args:
            wanted: for each owner, the places of rows in its slices, by index of the slice.
            like: tensor with the type and the width of the rows.
        """
        clients, found = {owner: self._peers.client(owner) for owner in wanted}, dict[int, torch.Tensor]()
        with self._world.awaiting("to send rows of a table"):
            for owner, slices in wanted.items():
                words = self._version, {index: len(places) for index, places in slices.items()}
                clients[owner].start("rows.pull", words, [bytes_of(places).numpy().data for places in slices.values()])
            for owner, slices in wanted.items():
                rows = torch.frombuffer(clients[owner].finish()[1], dtype=like.dtype).view(-1, like.shape[1])
                found.update(zip(slices, rows.split([*map(len, slices.values())]), strict=True))
        return found

    def _answer(self, rank: int, words: tuple[int, Mapping[int, int]], data: bytearray) -> Answer:
        """Answer in the thread of another worker."""
        version, counts = words
        with self._changed:
            ready = self._changed.wait_for(lambda: self._version >= version or not self._local, self._world.timeout)
        rows = [self._local.get(index) for index in counts]
        if not ready or any(one is None for one in rows):
            raise WorkerLost(
                f"Rank {self._world.rank} has no rows of version {version} for rank {rank}: it has made "
                f"{self._version} updates, or it has left the step."
            )
        places = torch.frombuffer(data, dtype=torch.int32).to(torch.int64).split([*counts.values()])
        return None, [bytes_of(one[at]).numpy().data for one, at in zip(rows, places, strict=True) if one is not None]


class TableRows:
    """Rows of a table, of which some are on other machines.

    Args:
        parts: all rows of the table, in order.
    """

    def __init__(self, pulled: PulledRows, parts: Sequence[_Part], table: SparseEmbedding) -> None:
        self._pulled: PulledRows | None = pulled
        self._parts, self._like = parts, table.blocks[0]
        self._starts = torch.tensor([*(one.start for one in parts), table.rows])

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows at sorted indices without duplicates."""
        self.check()
        assert self._pulled is not None
        ends = torch.searchsorted(indices, self._starts).tolist()
        found: torch.Tensor = self._like.new_empty(len(indices), self._like.shape[1])
        wanted: dict[int, dict[int, torch.Tensor]] = {}
        targets: dict[int, torch.Tensor] = {}
        for part, (begin, end) in zip(self._parts, pairwise(ends), strict=True):
            places = indices[begin:end] - part.start
            if part.rows is not None:
                torch.index_select(part.rows, 0, places, out=found[begin:end])
            elif begin < end:
                wanted.setdefault(part.owner, {})[part.place] = places.to(torch.int32)
                targets[part.place] = found[begin:end]
        for index, rows in self._pulled.pull(wanted, found).items() if wanted else ():
            targets[index].copy_(rows)
        return found

    def check(self) -> None:
        """Raise InputError if the rows can no longer be read."""
        if self._pulled is None:
            raise InputError(
                "The rows of a paceline.SparseEmbedding are on several machines, and no session trains it now: "
                "evaluate, predict and export before the session ends, or build the model again and start from a "
                "checkpoint."
            )

    def close(self) -> None:
        """Release the rows."""
        self._pulled, self._parts = None, ()

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "A paceline.SparseEmbedding whose rows are on several machines cannot be copied or pickled: use its "
            "state_dict(), session.export or a checkpoint."
        )
