"""Sums of records over ranges of steps, so that a run of any length is drawn from a few thousand numbers.

::

    written   one row for each record                       1,000,000 steps of 1,000 ranks
    cells     one row for each event, range and rank        256 to 511 ranges of `width` steps
    late      one row for each pair of ranks                how long one waited for the other

The width doubles when there are too many ranges. Both tables are part of the index (``observe.index``), and only
records that were added since the last time are summed up.
"""

from __future__ import annotations

import sqlite3
from typing import Any

RANGES = 256  # Least number of ranges in a long run. There are fewer than twice as many.
LAYOUT = """
CREATE TABLE cells(
    event TEXT, range INTEGER, rank INTEGER, count INTEGER, seconds REAL, bytes REAL, waited REAL, awaited REAL,
    loss REAL, losses INTEGER, first REAL, last REAL, PRIMARY KEY(event, range, rank)
) WITHOUT ROWID;
CREATE TABLE late(rank INTEGER, late INTEGER, seconds REAL, count INTEGER, PRIMARY KEY(rank, late)) WITHOUT ROWID;
CREATE TABLE summed(id INTEGER, width INTEGER);
"""
_SUMS = """
    SUM(count), SUM(seconds), SUM(bytes), SUM(waited), SUM(awaited), SUM(loss), SUM(losses), MIN(first), MAX(last)
"""
_FIELD = "CASE event WHEN 'step' THEN json_extract(record, '$.{}') END"
_NEW = f"""
INSERT INTO cells
SELECT event, step / :width, rank, COUNT(*), TOTAL(seconds), TOTAL(bytes), TOTAL({_FIELD.format("waited")}),
    TOTAL({_FIELD.format("awaited")}), TOTAL({_FIELD.format("loss")}), COUNT({_FIELD.format("loss")}),
    MIN(time), MAX(time)
FROM written WHERE id > :done AND id <= :last AND step >= 0 AND typeof(rank) = 'integer' GROUP BY 1, 2, 3
ON CONFLICT DO UPDATE SET
    count = count + excluded.count, seconds = seconds + excluded.seconds, bytes = bytes + excluded.bytes,
    waited = waited + excluded.waited, awaited = awaited + excluded.awaited, loss = loss + excluded.loss,
    losses = losses + excluded.losses, first = MIN(first, excluded.first), last = MAX(last, excluded.last)
"""
_NEW_LATE = """
INSERT INTO late
SELECT rank, json_extract(record, '$.late') AS late, TOTAL(json_extract(record, '$.awaited')), COUNT(*)
FROM written WHERE id > :done AND id <= :last AND event = 'step' AND typeof(late) = 'integer'
    AND typeof(rank) = 'integer' AND rank <> late GROUP BY 1, 2
ON CONFLICT DO UPDATE SET seconds = seconds + excluded.seconds, count = count + excluded.count
"""
_WIDEN = f"""
CREATE TEMP TABLE wider AS SELECT event, range / :factor, rank, {_SUMS} FROM cells GROUP BY 1, 2, 3;
DELETE FROM cells;
INSERT INTO cells SELECT * FROM wider;
DROP TABLE wider;
"""


class Cells:
    """Sums over ranges of steps in the tables of an index."""

    def __init__(self, base: sqlite3.Connection) -> None:
        self._base = base
        self.width = 1  # number of steps of a range

    def update(self) -> None:
        """Add the records that were written since the last call."""
        base = self._base
        base.execute("BEGIN IMMEDIATE")
        try:
            done, self.width = base.execute("SELECT id, width FROM summed").fetchone() or (0, 1)
            last = base.execute("SELECT COALESCE(MAX(id), 0) FROM written").fetchone()[0]
            if last > done:
                (most,) = base.execute(
                    "SELECT COALESCE(MAX(step), 0) FROM written WHERE id > ? AND event = 'step'", [done]
                ).fetchone()
                self._widen(most)
                values = {"done": done, "last": last, "width": self.width}
                base.execute(_NEW, values)
                base.execute(_NEW_LATE, values)
                base.execute("DELETE FROM summed")
                base.execute("INSERT INTO summed VALUES (?, ?)", (last, self.width))
            base.commit()
        except BaseException:
            base.rollback()
            raise

    def _widen(self, most: int) -> None:
        """Make ranges wide enough for a step number."""
        factor = 1
        while most // (self.width * factor) >= 2 * RANGES:
            factor *= 2
        if factor > 1:
            for statement in filter(str.strip, _WIDEN.split(";")):
                self._base.execute(statement, {"factor": factor} if ":factor" in statement else {})
            self.width *= factor

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query on the tables ``cells`` and ``late``."""
        return self._base.execute(query, values).fetchall()


def clear(base: sqlite3.Connection) -> None:
    """Forget all sums, because the records are read again."""
    for table in ("cells", "late", "summed"):
        base.execute(f"DELETE FROM {table}")
