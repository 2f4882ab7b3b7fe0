"""Index of a run's event records in SQLite, brought up to date before each search.

::

    events/rank-0.jsonl ──┐                     written   time, rank, generation, event, step, seconds, bytes, record
    events/rank-1.jsonl ──┼─ complete lines ──> texts     words of all strings in a record, for full-text search
    events/launcher.jsonl ┘   not yet read      files     how far each file has been read

The index is ``logs.sqlite`` in the run's directory, or in memory if that cannot be written. Reading continues where the
last search ended, so a search of a run that still trains reads only what is new. A line that its worker has not
finished is read later, or never if the worker was killed.

Searches read the view ``records``: the table ``written`` with times of the coordinator's clock. Later comparisons of
the clocks improve earlier times, so corrected times are not stored.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ConfigError, InputError
from paceline.observe.cells import LAYOUT as CELLS
from paceline.observe.cells import Cells, clear
from paceline.observe.records import Record, checked, encodable, number
from paceline.observe.tracing.clocks import Clocks, Key, key_of
from paceline.system.regular_files import open_regular

FILE = "logs.sqlite"
_VERSION = 3
_CHUNK = 1 << 24  # bytes read from a file at once
_LARGEST_WHOLE = 2**63
_TIMEOUT_SECONDS = 60.0  # time to wait for another search that brings the index up to date
_LAYOUT = f"""
CREATE TABLE files(path TEXT PRIMARY KEY, size INTEGER, skipped INTEGER, clock INTEGER, inode INTEGER);
CREATE TABLE written(
    id INTEGER PRIMARY KEY, time REAL, rank, generation INTEGER, event TEXT, step INTEGER, seconds REAL, bytes INTEGER,
    record TEXT, clock INTEGER  -- number of a comparison of the clock that the time is of
);
CREATE VIRTUAL TABLE texts USING fts5(text, content='');
{CELLS}
PRAGMA user_version = {_VERSION};
"""
_VIEW = """
DROP VIEW IF EXISTS temp.records;
CREATE TEMP VIEW records AS
    SELECT id, {} AS time, rank, generation, event, step, seconds, bytes, record FROM written;
"""
_INDEXES = {"by_event": "event, step", "by_step": "step", "by_seconds": "event, seconds", "by_time": "time"}
"""Created when the first records are there, because inserting into an index one by one takes longer."""


@dataclass(frozen=True)
class Search:
    """Conditions on records. All of them must hold; an empty condition holds for every record."""

    ranks: tuple[str, ...] = ()  # ranks, or names of processes that are not workers, such as ``launcher``
    events: tuple[str, ...] = ()  # names of events
    steps: range | None = None  # steps
    slower_than: float | None = None  # least duration in seconds
    text: str = ""  # words that the strings of a record contain; the last may be the beginning of a word

    def where(self) -> tuple[str, list[Any]]:
        terms: list[str] = []
        values: list[Any] = []
        for column, allowed in (("CAST(rank AS TEXT)", self.ranks), ("event", self.events)):
            if allowed:
                terms.append(f"{column} IN ({', '.join('?' * len(allowed))})")
                values += allowed
        if self.steps is not None:
            terms.append("step >= ? AND step < ?")
            values += [self.steps.start, self.steps.stop]
        if self.slower_than is not None:
            terms.append("seconds >= ?")
            values.append(self.slower_than)
        if self.text:
            terms.append("id IN (SELECT rowid FROM texts WHERE texts MATCH ?)")
            values.append('"' + self.text.replace('"', '""') + '"*')
        return " AND ".join(terms) or "1", values


class Table(NamedTuple):
    """Result of a query: names of the columns, and the rows."""

    columns: list[str]
    rows: Iterator[tuple[Any, ...]]


class RecordIndex:
    """Index of the records of a run.

    Args:
        more: directories with event files of the same run that other machines have written.

    Raises:
        InputError: a directory has no event files.
    """

    def __init__(self, run: Path, more: Sequence[Path] = ()) -> None:
        self._folders = [run, *more]
        for folder in self._folders:
            if not (folder / "events").is_dir():
                raise InputError(f"{folder} has no folder 'events', so it is not the directory of a run.")
        self._use(*_open(run / _name_of(more)))
        self.skipped = 0  # complete lines that are not records

    def _use(self, base: sqlite3.Connection, where: str) -> None:
        self._base, self._where = base, where
        base.create_function("corrected", 2, self._corrected)
        self.clocks = Clocks()
        self._keys: dict[int, Key] = {}  # clocks by the numbers of their comparisons

    def close(self) -> None:
        self._base.close()

    def cells(self) -> Cells:
        """Return the sums of the records over ranges of steps, brought up to date."""
        cells = Cells(self._base)
        cells.update()
        return cells

    def update(self) -> None:
        """Add the records that were written since the last call. Uses memory if the disk is full."""
        try:
            self._add_new()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise InputError(self._failed(error)) from None
            self._base.close()
            self._use(*_in_memory())
            self.update()
        except sqlite3.Error as error:
            raise InputError(self._failed(error)) from None

    def _failed(self, error: sqlite3.Error) -> str:
        cure = "Remove it: the next search builds it again."
        cure = "Another search reads it for the first time. Try again later." if "locked" in str(error) else cure
        return f"The index {self._where} cannot be brought up to date: {error}. {cure}"

    def _add_new(self) -> None:
        try:
            self._base.execute("BEGIN IMMEDIATE")
            paths = [path.resolve() for folder in self._folders for path in sorted((folder / "events").glob("*.jsonl"))]
            rows = self._base.execute("SELECT path, size, inode, clock FROM files").fetchall()
            states = {path: (size, clock) for path, size, _, clock in rows}
            other = not states.keys() <= {str(path) for path in paths}  # another search has read other folders, too
            if other or any(not _is_same(Path(path), size, inode) for path, size, inode, _ in rows):
                self._base.execute("DELETE FROM files")
                self._base.execute("DELETE FROM written")
                self._base.execute("INSERT INTO texts(texts) VALUES ('delete-all')")
                clear(self._base)
                states, self.clocks, self._keys = {}, Clocks(), {}
            for path in paths:
                self._read(path, *states.get(str(path), (0, None)))
            if not states:
                for name, columns in _INDEXES.items():
                    self._base.execute(f"CREATE INDEX IF NOT EXISTS {name} ON written({columns})")
                self._base.execute("ANALYZE")  # the choice of an index needs to know the numbers of events
            self.skipped = int(self._base.execute("SELECT TOTAL(skipped) FROM files").fetchone()[0])
            self._base.commit()
            self._compare_clocks()
        finally:
            if self._base.in_transaction:
                self._base.rollback()

    def _compare_clocks(self) -> None:
        """Read new comparisons of clocks. Define the view whose times are of the coordinator's clock."""
        query = "SELECT id, record FROM written WHERE event = 'clock' AND +id > ?"  # by the index on events
        for place, text in self._base.execute(query, [max(self._keys, default=0)]):
            if (key := self.clocks.add(json.loads(text))) is not None:
                self._keys[place] = key
        differ = any(clock.differs for clock in self.clocks.all().values())
        self._base.executescript(_VIEW.format("corrected(clock, time)" if differ else "time"))

    def _corrected(self, comparison: int | None, time: float) -> float:
        clock = None if comparison is None else self.clocks.of(self._keys.get(comparison))
        return time if clock is None else clock.corrected(time)

    def _read(self, path: Path, done: int, clock: int | None) -> None:
        """Add the lines of a file after the first ``done`` bytes.

        Args:
            clock: number of the last comparison of clocks before these lines. None if there is none.
        """
        try:
            with open_regular(path) as file:
                file.seek(done)
                skipped, inode = 0, os.fstat(file.fileno()).st_ino
                while lines := file.readlines(_CHUNK):
                    if not lines[-1].endswith(b"\n"):
                        lines.pop()
                    damaged, clock = self._add(lines, clock)
                    skipped += damaged
                    done += sum(map(len, lines))
        except OSError as error:
            raise InputError(f"The event file {path} cannot be read: {error.strerror}.") from None
        self._base.execute(
            "INSERT INTO files VALUES (?, ?, ?, ?, ?) ON CONFLICT(path) DO UPDATE "
            "SET size = excluded.size, skipped = skipped + excluded.skipped, clock = excluded.clock",
            (str(path), done, skipped, clock, inode),
        )

    def _add(self, lines: list[bytes], clock: int | None) -> tuple[int, int | None]:
        """Add the records in some lines. Return the number of lines that are not records, and the last comparison."""
        texts = (line.decode(errors="replace") for line in lines)
        known = [(record, _valid(text, record)) for text in texts if (record := checked(text)) is not None]
        first = self._base.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM written").fetchone()[0]
        numbers = [first + place if key_of(record) else None for place, (record, _) in enumerate(known)]
        if clock is None and (clock := next(filter(None, numbers), None)) is not None:
            rank = known[clock - first][0]["rank"]  # its earlier records may be in the index
            self._base.execute("UPDATE written SET clock = ? WHERE clock IS NULL AND rank = ?", (clock, rank))
        clocks = [clock := number or clock for number in numbers]
        rows = ((first + place, *columns_of(record), text, clocks[place]) for place, (record, text) in enumerate(known))
        self._base.executemany("INSERT INTO written VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        words = ((first + place, text) for place, (record, _) in enumerate(known) if (text := _text(record)))
        self._base.executemany("INSERT INTO texts(rowid, text) VALUES (?, ?)", words)
        return len(lines) - len(known), clock

    def find(self, search: Search, after: int = 0) -> Iterator[tuple[int, Record]]:
        """Yield the number of each matching record and the record, in order of their times.

        Args:
            after: yield only records with larger numbers, which were added later. Defaults to 0.
        """
        where, values = search.where()
        query = f"SELECT id, time, record FROM records WHERE {where} AND id > ? ORDER BY time, id"
        for place, time, text in self._base.execute(query, [*values, after]):
            yield place, {**json.loads(text), "time": time}

    def newest(self, search: Search, count: int) -> list[Record]:
        """Return the matching records with the latest times, the newest first."""
        where, values = search.where()
        time = "time" if where == "1" else "+time"  # else the search would go through all records by their times
        newest = f"SELECT id FROM written WHERE {where} ORDER BY {time} DESC, id DESC LIMIT ?"
        query = f"SELECT time, record FROM records WHERE id IN ({newest}) ORDER BY time DESC, id DESC"
        return [{**json.loads(text), "time": time} for time, text in self._base.execute(query, [*values, count])]

    def query(self, statement: str) -> Table:
        """Run an SQL query, which can only read."""
        self._base.set_authorizer(lambda what, *_: sqlite3.SQLITE_OK if what in _READS else sqlite3.SQLITE_DENY)
        try:
            cursor = self._base.execute(statement)
            if cursor.description is None:
                raise ConfigError("--sql needs a query, such as 'select event, count(*) from records group by event'.")
            return Table([column[0] for column in cursor.description], _rows(cursor))
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            raise _wrong(error) from None
        finally:
            self._base.set_authorizer(None)


_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


def _rows(cursor: sqlite3.Cursor) -> Iterator[tuple[Any, ...]]:
    try:
        yield from cursor
    except sqlite3.Error as error:
        raise _wrong(error) from None


def _wrong(error: Exception) -> ConfigError:
    return ConfigError(
        f"--sql cannot be run: {error}. It reads the table records(time, rank, generation, event, step, seconds, "
        f"bytes, record); other fields are json_extract(record, '$.loss')."
    )


def columns_of(record: Record) -> tuple[Any, ...]:
    """Return the columns of a record that have an index or are summed up."""
    whole = (record.get(name) for name in ("step", "bytes"))
    step, size = (one if type(one) is int and abs(one) < _LARGEST_WHOLE else None for one in whole)
    seconds = number(record.get("seconds"))
    rank = record["rank"] if isinstance(record["rank"], int) else encodable(record["rank"])
    rank, generation = (one if _fits(one) else -1 for one in (rank, record["generation"]))
    return record["time"], rank, generation, encodable(record["event"]), step, seconds, size


def _fits(value: int | str) -> bool:
    return isinstance(value, str) or abs(value) < _LARGEST_WHOLE


def _valid(text: str, record: Record) -> str:
    """Return the text of a record as valid JSON: null in place of NaN and infinities, which SQLite does not read."""
    return json.dumps(finite(record)) if "NaN" in text or "Infinity" in text else text


def finite(value: Any) -> Any:
    """Return a JSON value with null in place of NaN and infinities."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [*map(finite, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(record: Record) -> str:
    """Return the strings of a record, including those in lists and dictionaries, separated by spaces."""
    values = (value for key, value in record.items() if key not in ("event", "rank") and not isinstance(value, float))
    return encodable(" ".join(_strings(values)))


def _strings(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from _strings(value)
        elif isinstance(value, dict):
            yield from _strings(value.values())


def _is_same(path: Path, size: int, inode: int) -> bool:
    """Return whether a file is the one that was read, and has not become shorter."""
    with suppress(OSError):
        found = path.stat()
        return found.st_size >= size and found.st_ino == inode
    return False


def _name_of(more: Sequence[Path]) -> str:
    """Return the name of the index: each set of other folders has its own, so that readers drop no others' records."""
    folders = "\n".join(sorted({str(one.resolve()) for one in more}))
    return f"logs-{hashlib.blake2b(folders.encode(), digest_size=4).hexdigest()}.sqlite" if more else FILE


def _open(path: Path) -> tuple[sqlite3.Connection, str]:
    """Open the index, build it again if another version wrote it, and use memory if it cannot be written."""
    if not path.is_symlink():
        with suppress(sqlite3.Error, OSError):
            if (base := _connect(str(path))) is None:
                path.unlink()
                base = _connect(str(path), new=True)
            if base is not None:
                return base, str(path)
    return _in_memory()


def _in_memory() -> tuple[sqlite3.Connection, str]:
    base = _connect(":memory:", new=True)
    assert base is not None
    base.execute("PRAGMA temp_store = MEMORY")  # sorting would use files, and the disk may be full
    return base, "in memory"


def _connect(path: str, new: bool = False) -> sqlite3.Connection | None:
    """Open a database that can be written. Return None if it has another layout."""
    base = sqlite3.connect(path, timeout=_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        if new:
            base.executescript(_LAYOUT)
        base.execute("PRAGMA synchronous = OFF")  # an index that a crash has damaged can be built again
        base.execute("BEGIN IMMEDIATE").connection.rollback()
        if base.execute("PRAGMA user_version").fetchone()[0] == _VERSION:
            return base
    except sqlite3.Error:
        base.close()
        raise
    base.close()
    return None
