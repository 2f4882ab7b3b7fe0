"""Table in shared memory that assigns steps to workers, for strategies in which a single worker computes each step.

::

    step       0  1  2  3  4  5  6  7         top = 6: the steps before it were offered
               ✓  ✓  ②  ✓  ·  ①               step 2 is computed by rank 2, step 5 by rank 1, step 4 is free again

A worker whose loop reaches a step offers it, and takes the lowest free step. An offered step is done if it is neither
free nor owned. So the table holds a few numbers for each worker, whatever the distance between the workers' steps.

The table has two copies. A change is written to the spare copy, then a counter makes that copy current. A worker that
is killed at any instant leaves a consistent table, and the kernel releases its lock. A change takes 8 us, a read 2 us.

For updates that are made in place, outside the table, each worker has two more words::

              update    change
    busy  ▁▁▁▁▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▁▁▁▁      closing the table waits until this ends; no update begins after it
    made  ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▓▓▓▓▓▓▁▁▁▁▁▁      the update is made, but not yet in the table

A worker that has made an update may still change the table after others have closed it. If it is killed before the
change, its step counts as done. So a complete update counts exactly once. These words cost 4 us.
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

FREE = -1  # owner of a step that no worker computes

_HEAD = struct.Struct("<qqqqqqdddqq")
_PAIR = struct.Struct("<qq")
_METRICS_BYTES = 1 << 13
_CLOSED, _CHANGES, _WORDS = 0, 1, 2
_BUSY, _MADE, _WORDS_EACH = 0, 1, 2
"""Words of each worker: whether it makes an update; 1 + the step of an update that is not yet in the table."""
_PATIENCE_SECONDS = 1.0  # time for a worker to complete a change of the table before it is closed
_UPDATE_SECONDS = 3.0
"""Time for a worker to complete an update, which is slower. The coordinator waits 5 s before a last save."""


@dataclass
class ClaimTable:
    """State of all steps, shared by the workers.

    Attributes:
        top: the first step that has not been offered. No worker's loop is beyond it.
        open: steps that are offered and not done, with the rank that computes each, or ``FREE``.
        version: number of updates made.
        stop: the step after which all workers act on a notice, or -1.
        notice: the notice on which the workers act.
        newest: the step of the newest outcome, or -1.
        loss, norm, rate: loss, gradient norm and learning rate of the newest outcome.
        applied: whether the newest outcome's update was applied.
        metrics: metrics of the newest outcome.
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
        return min(self.open, default=self.top)

    @property
    def done(self) -> int:
        return self.top - len(self.open)

    def offer(self, step: int) -> None:
        """Offer a step that a worker's loop has reached, if it is new."""
        if step >= self.top:
            self.top = step + 1
            self.open[step] = FREE

    @property
    def has_free(self) -> bool:
        return FREE in self.open.values()

    def take(self, rank: int) -> int | None:
        """Assign the lowest free step to a worker and return it, or None if no step is free."""
        free = min((step for step, owner in self.open.items() if owner == FREE), default=None)
        if free is not None:
            self.open[free] = rank
        return free

    def give_back(self, step: int) -> None:
        """Mark a step as free, so that it is computed again."""
        self.open[step] = FREE

    def owners(self, stop: float = math.inf) -> list[int]:
        """Return the ranks that compute steps before ``stop``, sorted."""
        return sorted({owner for step, owner in self.open.items() if step < stop and owner != FREE})


class Claims(Protocol):
    """Interface to the workers' table, in shared memory or over the network."""

    def begin(self, table: ClaimTable) -> None:
        """Reset the table. Only rank 0 may call this, while no other worker uses the table."""

    def await_begin(self) -> None:
        """Wait until the table is reset. All workers call this."""

    def read(self) -> ClaimTable:
        """Return the current table."""

    def wait_until(self, ready: Callable[[ClaimTable], bool], awaited: Callable[[ClaimTable], list[int]]) -> None:
        """Wait for a condition on the table. ``awaited``: returns the ranks on which the condition depends."""

    def change(self) -> AbstractContextManager[ClaimTable]:
        """Change the table in a context. The table stays as it is if the body raises.

        Raises:
            WorkerLost: a worker was lost, and other workers have already closed the table.
        """

    def arrive(self) -> None:
        """Announce that this worker synchronizes."""

    def missing(self) -> list[int]:
        """Return the ranks that have not called :meth:`arrive`."""

    def close(self) -> ClaimTable:
        """Close the table to further changes and return it. For workers that re-form after a loss."""

    def last(self) -> ClaimTable:
        """Return the table after :meth:`close`, including updates that were made but not written to it."""


class StepClaims:
    """Table in shared memory, with a lock for changes. All workers create the table together, then rank 0 resets it."""

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
        self._lock = shared_memory.lock(self._check_alive)
        self._flag = shared_memory.reserve(2)
        self._starts = 0

    def begin(self, table: ClaimTable) -> None:
        for word in range(_WORDS + len(self._updates) * _WORDS_EACH):
            self._words[word] = 0
        self._write(table)

    def await_begin(self) -> None:
        self._starts += 1
        if self._world.rank == 0:
            self._shared_memory.announce(self._flag, self._starts)
        else:
            self._shared_memory.wait(self._flag, self._starts, places=(0,))

    def arrive(self) -> None:
        self._shared_memory.announce(self._flag + 1, self._starts)

    def missing(self) -> list[int]:
        announced, arrived = self._shared_memory.announced, self._flag + 1
        return [rank for rank in range(self._world.size) if not announced(arrived, self._starts, [rank])]

    def wait_until(self, ready: Callable[[ClaimTable], bool], awaited: Callable[[ClaimTable], list[int]]) -> None:
        self._shared_memory.wait_until(lambda: ready(self.read()), lambda: awaited(self.read()))

    def read(self) -> ClaimTable:
        while True:
            changes = self._words[_CHANGES]
            table = self._read(changes)
            if self._words[_CHANGES] == changes:
                return table

    @contextmanager
    def change(self) -> Iterator[ClaimTable]:
        with self._lock:
            table = self._read(self._words[_CHANGES])
            yield table
            if not self._words[self._made]:
                self._check_open()
            self._write(table)
            self._words[self._made] = 0

    @contextmanager
    def updating(self) -> Iterator[ClaimTable]:
        """Make an update in place: the body calls :meth:`made`, then :meth:`change`. :meth:`close` waits for its end.

        Raises:
            WorkerLost: a worker was lost, and other workers have already closed the table.
        """
        try:
            with self._lock:
                self._words[self._busy] = 1
                fence()  # a worker that closes without the lock sees busy, or this worker sees closed
                self._check_open()
                table = self._read(self._words[_CHANGES])
            yield table
        finally:
            self._words[self._busy] = 0

    def made(self, step: int) -> None:
        """Record that the update of this step is made. The next change of the table clears the record."""
        self._words[self._made] = 1 + step

    def _check_open(self) -> None:
        if self._words[_CLOSED]:
            raise WorkerLost(
                f"Rank {self._world.rank}: another worker was lost, and the others are already re-forming."
            )

    @contextmanager
    def hold(self) -> Iterator[ClaimTable]:
        """Read the table in a context and keep it from changing."""
        with self._lock:
            yield self._read(self._words[_CHANGES])

    def close(self) -> ClaimTable:
        self._hasty = True
        try:
            with self._lock:
                self._words[_CLOSED] = 1
        except _TooLong:  # the lock's owner was stopped and dropped
            self._words[_CLOSED] = 1
        fence()  # a worker that begins an update sees closed, or this worker sees busy
        begin = now = time.monotonic()
        while now - begin < _UPDATE_SECONDS and self._is_updated():
            time.sleep(backoff_seconds(now - begin))
            now = time.monotonic()
        return self.last()

    def last(self) -> ClaimTable:
        table = self.read()
        for word in self._updates:
            step = self._words[word + _MADE] - 1
            if step in table.open:
                del table.open[step]
                table.version += 1
        return table

    def _is_updated(self) -> bool:
        """Return whether a worker that may still write is making an update."""
        return any(
            self._words[word + _BUSY] and not self._shared_memory.gone(rank) for rank, word in enumerate(self._updates)
        )

    def _check_alive(self, ranks: list[int], waited: float) -> None:
        patient = waited <= _PATIENCE_SECONDS
        if self._hasty:
            if not patient:
                raise _TooLong
        elif not (self._words[self._made] and patient):  # a finished update must first reach the table
            self._shared_memory.check_alive(ranks, waited)
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
    """Return the written metrics, or none if a writer is active. The reader detects the change and reads again."""
    try:
        return dict(json.loads(text))
    except ValueError:
        return {}


class _TooLong(Exception):
    """The lock could not be acquired in time."""
