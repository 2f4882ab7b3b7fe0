"""Who is at which step, where each step is computed by one worker: a table in shared memory.

::

    step       0  1  2  3  4  5  6  7         top = 6: the steps before it were offered
               ✓  ✓  ②  ✓  ·  ①               step 2 is computed by rank 2, step 5 by rank 1, step 4 is free again

A worker that comes to a step offers it, and takes the lowest one that is free. Done is what was offered, is not free
and is computed by nobody: so the table holds a few numbers for each worker, however far they are apart.

The table has two copies. A change is written into the spare one, then a number flips which one counts: a worker that is
killed at any instant leaves a whole table, and the kernel takes back its lock. A change costs 8 us, a look 2 us.

For updates that are made in place, beside the table, each worker has two numbers more::

              update    change
    busy  ▁▁▁▁▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▁▁▁▁      whoever parts waits for the end of it; from then on none begins
    made  ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▓▓▓▓▓▓▁▁▁▁▁▁      it is made, and the table does not say so yet

Who has made one may still change the table after the others have closed it; where a worker was killed before it could,
its step counts as done. So an update that is whole counts once. All this costs 4 us.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from paceline.comm.shm.arena import SharedMemory
from paceline.comm.shm.backoff import backoff_seconds
from paceline.comm.shm.futex import fence
from paceline.comm.world import World
from paceline.errors import InputError, WorkerLost

FREE = -1
"""Nobody computes the step."""

_HEAD = struct.Struct("<qqqqqqdddqq")
_PAIR = struct.Struct("<qq")
_METRICS_BYTES = 1 << 13
_CLOSED, _CHANGES, _WORDS = 0, 1, 2
_BUSY, _MADE, _WORDS_EACH = 0, 1, 2
"""Of each worker: whether it makes an update; 1 + the step of one that is made and not yet in the table."""
_PATIENCE_SECONDS = 1.0
"""For whoever is in the middle of a change when the workers part."""
_UPDATE_SECONDS = 3.0
"""For whoever is in the middle of an update then: it may take longer. The coordinator waits 5 s before a last save."""


@dataclass
class ClaimTable:
    """What all workers know of each other.

    Attributes:
        top: the first step that nobody has offered yet; no worker's loop is beyond it.
        open: the steps offered and not done: the rank that computes each, or ``FREE``.
        version: updates made so far.
        stop: the step at whose end all workers act on a notice; -1 if there is none.
        notice: what they act on then.
        newest: the step of the newest outcome; -1 if there is none.
        loss, norm, rate: the newest outcome.
        applied: whether it was applied.
        metrics: of the newest outcome.
    """

    top: int = 0
    open: dict[int, int] = field(default_factory=dict)
    version: int = 0
    stop: int = -1
    notice: int = 0
    newest: int = -1
    loss: float = 0.0
    norm: float = 0.0
    rate: float = 0.0
    applied: bool = True
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def done_before(self) -> int:
        """All steps before this one are done."""
        return min(self.open, default=self.top)

    @property
    def done(self) -> int:
        """How many steps are done."""
        return self.top - len(self.open)

    def offer(self, step: int) -> None:
        """A worker has come to this step."""
        if step >= self.top:
            self.top = step + 1
            self.open[step] = FREE

    @property
    def has_free(self) -> bool:
        """Whether a step is to be had."""
        return FREE in self.open.values()

    def take(self, rank: int) -> int | None:
        """The lowest free step, for a worker that will compute it now; none if no step is free."""
        free = min((step for step, owner in self.open.items() if owner == FREE), default=None)
        if free is not None:
            self.open[free] = rank
        return free

    def give_back(self, step: int) -> None:
        """The step is to be computed again."""
        self.open[step] = FREE

    def owners(self, stop: float = math.inf) -> list[int]:
        """The workers that compute steps before this one."""
        return sorted({owner for step, owner in self.open.items() if step < stop and owner != FREE})


class Claims(Protocol):
    """The table of these workers, wherever it is."""

    def begin(self, table: ClaimTable) -> None:
        """Start anew; only rank 0 does, while the others do nothing with the table."""
        ...

    def await_begin(self) -> None:
        """Until all workers can go on from the new start; all call this."""
        ...

    def look(self) -> ClaimTable:
        """The table as it is now."""
        ...

    def wait_until(self, ready: Callable[[ClaimTable], bool], awaited: Callable[[ClaimTable], list[int]]) -> None:
        """Wait for a condition on the table.

        Args:
            ready: the condition.
            awaited: the workers on which it depends.

        Raises:
            WorkerLost: a worker was lost, or one of those stayed silent for the timeout.
        """
        ...

    def change(self) -> AbstractContextManager[ClaimTable]:
        """Change the table; if the body raises, nothing is changed.

        Raises:
            WorkerLost: a worker was lost, and others have gone on with the table as it was.
        """
        ...

    def arrive(self) -> None:
        """This worker synchronizes."""
        ...

    def missing(self) -> list[int]:
        """The workers that have yet to synchronize."""
        ...

    def close(self) -> ClaimTable:
        """The last table: nobody changes it any more. For workers that re-form because one was lost."""
        ...

    def last(self) -> ClaimTable:
        """The table after :meth:`close`, with the updates that were made and that nobody could write into it."""
        ...


class StepClaims:
    """The table in shared memory, with a lock for changes; all of them make it together, then rank 0 begins it."""

    def __init__(self, world: World, shared_memory: SharedMemory) -> None:
        self._world = world
        self._shared_memory = shared_memory
        self._tables_at = 8 * (_WORDS + _WORDS_EACH * world.size)
        self._room = _HEAD.size + _PAIR.size * 4 * world.size + _METRICS_BYTES
        self._block = shared_memory.share(self._tables_at + 2 * self._room)[0]
        self._words = memoryview(self._block).cast("q")
        self._updates = [_WORDS + _WORDS_EACH * rank for rank in range(world.size)]
        self._busy, self._made = (self._updates[world.rank] + word for word in (_BUSY, _MADE))
        self._hasty = False
        self._lock = shared_memory.lock(self._look)
        self._flag = shared_memory.reserve(2)
        self._starts = 0

    def begin(self, table: ClaimTable) -> None:
        """Start anew; only one worker does, while the others do nothing with the table."""
        for word in range(_WORDS + len(self._updates) * _WORDS_EACH):
            self._words[word] = 0
        self._write(table)

    def await_begin(self) -> None:
        """Until rank 0 has begun."""
        self._starts += 1
        if self._world.rank == 0:
            self._shared_memory.announce(self._flag, self._starts)
        else:
            self._shared_memory.wait(self._flag, self._starts, places=(0,))

    def arrive(self) -> None:
        """See :class:`Claims`."""
        self._shared_memory.announce(self._flag + 1, self._starts)

    def missing(self) -> list[int]:
        """See :class:`Claims`."""
        announced, arrived = self._shared_memory.announced, self._flag + 1
        return [rank for rank in range(self._world.size) if not announced(arrived, self._starts, [rank])]

    def wait_until(self, ready: Callable[[ClaimTable], bool], awaited: Callable[[ClaimTable], list[int]]) -> None:
        """See :class:`Claims`."""
        self._shared_memory.wait_until(lambda: ready(self.look()), lambda: awaited(self.look()))

    def look(self) -> ClaimTable:
        """The table as it is now, without the lock."""
        while True:
            changes = self._words[_CHANGES]
            table = self._read(changes)
            if self._words[_CHANGES] == changes:
                return table

    @contextmanager
    def change(self) -> Iterator[ClaimTable]:
        """Change the table; if the body raises, nothing is changed.

        Raises:
            WorkerLost: a worker was lost, and others have gone on with the table as it was.
        """
        with self._lock:
            table = self._read(self._words[_CHANGES])
            yield table
            if not self._words[self._made]:
                self._check_open()
            self._write(table)
            self._words[self._made] = 0

    @contextmanager
    def updating(self) -> Iterator[ClaimTable]:
        """Make an update in place, say that it is :meth:`made`, and change the table: who parts waits for all of this.

        Raises:
            WorkerLost: a worker was lost, and others have gone on with the table as it was.
        """
        try:
            with self._lock:
                self._words[self._busy] = 1
                fence()  # who parts without the lock sees this, or is seen
                self._check_open()
                table = self._read(self._words[_CHANGES])
            yield table
        finally:
            self._words[self._busy] = 0

    def made(self, step: int) -> None:
        """The update of this step is made; the next change of the table says so."""
        self._words[self._made] = 1 + step

    def _check_open(self) -> None:
        if self._words[_CLOSED]:
            raise WorkerLost(
                f"Rank {self._world.rank}: another worker was lost, and the others are already re-forming."
            )

    @contextmanager
    def hold(self) -> Iterator[ClaimTable]:
        """Look at the table, which stays as it is meanwhile."""
        with self._lock:
            yield self._read(self._words[_CHANGES])

    def close(self) -> ClaimTable:
        """The last table: nobody changes it any more. For workers that re-form because one was lost."""
        self._hasty = True
        try:
            with self._lock:
                self._words[_CLOSED] = 1
        except _TooLong:  # who holds the lock was stopped, and was dropped
            self._words[_CLOSED] = 1
        fence()  # who begins an update now sees this, or is seen
        begin = now = time.monotonic()
        while now - begin < _UPDATE_SECONDS and self._is_updated():
            time.sleep(backoff_seconds(now - begin))
            now = time.monotonic()
        return self.last()

    def last(self) -> ClaimTable:
        """The table after :meth:`close`, with the updates that were made and that nobody could write into it."""
        table = self.look()
        for word in self._updates:
            step = self._words[word + _MADE] - 1
            if step in table.open:
                del table.open[step]
                table.version += 1
        return table

    def _is_updated(self) -> bool:
        """Whether a worker that can still do something makes an update."""
        return any(
            self._words[word + _BUSY] and not self._shared_memory.gone(rank) for rank, word in enumerate(self._updates)
        )

    def _look(self, ranks: list[int], waited: float) -> None:
        patient = waited <= _PATIENCE_SECONDS
        if self._hasty:
            if not patient:
                raise _TooLong
        elif not (self._words[self._made] and patient):  # else it must not part before the table says so
            self._shared_memory.look(ranks, waited)
            self._world.check()

    def _place(self, changes: int) -> int:
        return self._tables_at + changes % 2 * self._room

    def _read(self, changes: int) -> ClaimTable:
        place = self._place(changes)
        top, version, stop, notice, newest, applied, loss, norm, rate, count, size = _HEAD.unpack_from(
            self._block, place
        )
        place += _HEAD.size
        text = place + _PAIR.size * count
        pairs = dict(_PAIR.iter_unpack(self._block[place:text]))
        metrics = _metrics(bytes(self._block[text : text + size])) if size else {}
        return ClaimTable(top, pairs, version, stop, notice, newest, loss, norm, rate, bool(applied), metrics)

    def _write(self, table: ClaimTable) -> None:
        changes = self._words[_CHANGES] + 1
        place, count = self._place(changes), len(table.open)
        assert count <= 4 * self._world.size, f"{count} steps are open for {self._world.size} workers"
        head = table.top, table.version, table.stop, table.notice, table.newest, int(table.applied)
        text = json.dumps(table.metrics).encode() if table.metrics else b""
        if len(text) > _METRICS_BYTES:
            raise InputError(
                f"The {len(table.metrics)} metrics of a step take {len(text)} bytes with their names, and this "
                f"strategy has room for {_METRICS_BYTES}: return fewer, or shorter names."
            )
        _HEAD.pack_into(self._block, place, *head, table.loss, table.norm, table.rate, count, len(text))
        place += _HEAD.size
        rest = [number for pair in table.open.items() for number in pair]
        struct.pack_into(f"<{len(rest)}q", self._block, place, *rest)
        place += _PAIR.size * count
        self._block[place : place + len(text)] = text
        self._words[_CHANGES] = changes


def _metrics(text: bytes) -> dict[str, float]:
    """Metrics as they were written; none if they are being written now, as the reader finds out."""
    try:
        return dict(json.loads(text))
    except ValueError:
        return {}


class _TooLong(Exception):
    """The lock was not to be had."""
