"""Journal of the rows that an update in place changes, so that survivors can undo an update that does not count.

::

    journal    rows 3, 7 as in version 4 | for version 5        is written before the update
    table      rows 3, 7: version 5                             then changed in place
    claims     version 4                                        the worker is lost: rows 3, 7 come from the journal

The journal lies in shared memory. Workers use it in turn, with the lock of the table of steps. If the holder of this
lock is killed, the kernel gives it to the next worker, before anyone knows of the loss. So each update
restores the rows of the journal first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.comm.servers.shard import Blocks, is_of_table
from paceline.comm.shm.futex import fence
from paceline.comm.shm.tensors import aligned, view_of
from paceline.comm.values import decode, encode

_HEADER = struct.Struct("<qq")
_WORDS_AT, _WORDS_EACH, _MOST_KEYS = 64, 1 << 12, 8
_NONE = -1


class RowJournal:
    """Rows of some tables and of their optimizer states before an update.

    Args:
        memory: memory that the workers share. All workers construct the journal together.
        tables: the tables, whose gradients are sparse.
        optimizer: optimizer of the tables.
    """

    def __init__(self, memory: Blocks, tables: Sequence[nn.Parameter], optimizer: Optimizer) -> None:
        self._tables, self._optimizer = tables, optimizer
        self._rows_at = _WORDS_AT + _WORDS_EACH * max(1, len(tables))
        rows = sum(8 * len(one) + (1 + _MOST_KEYS) * one.nbytes + 64 * (2 + _MOST_KEYS) for one in tables)
        self._block = memory.share(self._rows_at + rows)[0]

    def begin(self) -> None:
        """Forget the last update, while no worker makes one."""
        _HEADER.pack_into(self._block, 0, _NONE, 0)

    def keep(self, version: int) -> None:
        """Keep the rows that the update ``version`` will change, after undoing an update of a lost worker."""
        self.restore(version - 1)
        self.begin()
        fence()
        words, place = [], self._rows_at
        for index, table in enumerate(self._tables):
            if table.grad is None:
                continue
            rows = table.grad.coalesce().indices()[0]
            kept = [rows]
            state = {key: one for key, one in self._optimizer.state.get(table, {}).items() if is_of_table(one, table)}
            kept += [one.detach()[rows] for one in (table, *state.values())]
            words.append((index, len(rows), [(key, one.dtype, one.shape[1:]) for key, one in state.items()], place))
            for one in kept:
                view_of(self._block, place, one.dtype, tuple(one.shape)).copy_(one)
                place += aligned(one.nbytes)
        text = encode(words)
        assert len(text) <= self._rows_at - _WORDS_AT, f"{len(text)} bytes beside the rows"
        self._block[_WORDS_AT : _WORDS_AT + len(text)] = text
        fence()
        _HEADER.pack_into(self._block, 0, version, len(text))

    def restore(self, version: int) -> None:
        """Restore the rows that the update after ``version`` has changed, in this worker's tables."""
        number, length = _HEADER.unpack_from(self._block, 0)
        if number != version + 1:
            return
        for index, count, keys, place in decode(bytes(self._block[_WORDS_AT : _WORDS_AT + length])):
            table = self._tables[index]
            rows = view_of(self._block, place, torch.int64, (count,))
            place += aligned(rows.nbytes)
            for key, dtype, rest in [(None, table.dtype, table.shape[1:]), *keys]:
                values = view_of(self._block, place, dtype, (count, *rest))
                place += aligned(values.nbytes)
                held = table.detach() if key is None else self._optimizer.state.get(table, {}).get(key)
                if held is not None:
                    held[rows] = values
