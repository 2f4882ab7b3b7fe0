"""Event log: one JSON object per line, one file per rank.

A record has ``time`` (seconds since 1970), ``event``, ``rank``, ``generation`` (the number of membership changes),
``step`` (the step that it is about, or else the last that began) and the fields of its event: ``seconds``, ``bytes``,
... A log has a level, and leaves out events of higher levels. Adding a record takes 2 microseconds; a background
thread writes it. If a write fails, records are lost but training continues; the last record counts the lost records.
If the disk still stalls when the log is closed, a warning counts the records that were not written.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TypeAlias

_log = logging.getLogger("paceline")
_FLUSH_SECONDS = 0.2
_CLOSE_SECONDS = 5.0
_USAGE_SECONDS = 5.0
"""Time between two records of memory and processor time."""
_ENCODE = json.JSONEncoder(default=str).encode
_WRITING = threading.Lock()
"""Held by the log that writes. Two sessions of a script may append to one file, and lines must not mix."""

Level: TypeAlias = Literal["minimal", "steps", "operations"]
_ORDER: dict[Level, int] = {"minimal": 0, "steps": 1, "operations": 2}
_LEVEL_OF: dict[str, Level] = {
    **dict.fromkeys(("start", "batches", "step", "phase", "update", "dropped", "skipped", "metrics"), "minimal"),
    **dict.fromkeys(("evaluation", "note", "strategy", "communication", "clock", "lost-records"), "minimal"),
    **dict.fromkeys(("gathered", "recovered", "went back", "departure", "not saved", "resume"), "minimal"),
    **dict.fromkeys(("samples", "anomaly", "profile"), "minimal"),  # of a replay, which asks for them
    **dict.fromkeys(("branch", "branch-end"), "minimal"),  # of ``paceline tune``
    **dict.fromkeys(("checkpoint", "checkpoint-failed", "checkpoint-damaged"), "minimal"),
    **dict.fromkeys(("transfer", "wait"), "operations"),
}
"""Levels of events. The other events of workers are of level ``steps``. ``minimal`` has those that progress,
trackers and ``observe.ledger`` read, and those that explain a failure."""


class Listener(Protocol):
    """Receiver of event records, called on the thread that creates them. It must not block."""

    def offer(self, record: dict[str, object], /) -> object:
        """Receive a record."""

    def close(self) -> object:
        """Stop. Called when the log is closed."""


def _append(path: Path, lines: str) -> None:
    """Append lines to a file."""
    with path.open("ab+") as file:
        file.write(_line_end(file) + lines.encode())


class EventLog:
    """Log that writes the records of one rank to ``<directory>/rank-<rank>.jsonl``, or nowhere without a directory."""

    def __init__(
        self,
        directory: Path | None,
        rank: int | str,  # rank of this process, or the name of a process that is not a worker
        generation: int = 0,
        append: Callable[[Path, str], None] = _append,
    ) -> None:
        self.rank: int | str = rank
        self.generation = generation
        self.step: int | None = None  # step that this worker has begun last
        self.level: Level = "steps"
        self.lost = 0
        self._append = append
        self._records: deque[dict[str, object]] = deque()
        self._in_write = 0  # records that have left the queue for a write that has not ended
        self._closed = threading.Event()
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._directory = directory
            self._thread = threading.Thread(target=self._write_until_closed, name="paceline-events", daemon=True)
            self._thread.start()

    def attach(self, listener: Listener) -> None:
        """Pass all further records to a listener."""
        self._listener = listener

    def move(self, rank: int, generation: int) -> None:
        """Write further records to the file of another rank, with this generation."""
        self.rank, self.generation = rank, generation

    def keeps(self, event: str) -> bool:
        """Return whether the level of this log includes an event."""
        return _ORDER[_LEVEL_OF.get(event, "steps")] <= _ORDER[self.level]

    def mark(self, event: str, **fields: object) -> None:
        """Add a record of an event, with the current time. ``step=None`` marks an event that is about no step."""
        if (self._thread is None and self._listener is None) or not self.keeps(event):
            return
        record = self._record(event, fields)
        if self._thread is not None:
            self._records.append(record)
        if self._listener is not None:
            self._listener.offer(record)

    def _record(self, event: str, fields: dict[str, object]) -> dict[str, object]:
        record = {
            "time": time.time(),
            "event": event,
            "rank": self.rank,
            "generation": self.generation,
            "step": self.step,
            **fields,
        }
        if record["step"] is None:
            del record["step"]
        return record

    @contextmanager
    def span(self, event: str, **fields: object) -> Iterator[None]:
        """Add a record with the duration of the block, in seconds, even if the block raises."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.mark(event, **fields, seconds=time.perf_counter() - begin)

    def close(self) -> None:
        """Write the remaining records, then stop the thread and the listener.

        Waits at most 5 seconds for a stalled disk, then warns how many records were not written.
        """
        if self._thread is not None:
            self._closed.set()
            self._thread.join(timeout=_CLOSE_SECONDS)
            if self._thread.is_alive():
                _log.warning(
                    "%s: %d event records were not written within %g seconds, so the file ends without them. Training "
                    "is not affected. Check that its disk responds.",
                    self._path(self.rank),
                    self._in_write + len(self._records),
                    _CLOSE_SECONDS,
                )
            self._thread = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def flush(self) -> None:
        """Write pending records immediately. Use it for records that no other worker has a copy of."""
        if self._thread is not None:
            self._write_waiting()

    def _write_until_closed(self) -> None:
        before, busy = time.monotonic(), time.process_time()
        while not self._closed.wait(_FLUSH_SECONDS):
            now = time.monotonic()
            if now - before >= _USAGE_SECONDS and isinstance(self.rank, int) and self.keeps("usage"):
                cores, before, busy = (time.process_time() - busy) / (now - before), now, time.process_time()
                self._records.append(self._record("usage", {"bytes": resident_bytes(), "cores": round(cores, 3)}))
            self._write_waiting()
        if self.lost:
            self._records.append(self._record("lost-records", {"count": self.lost}))
        self._write_waiting()

    def _write_waiting(self) -> None:
        with _WRITING:
            lines: dict[object, list[str]] = {}
            while self._records:
                record = self._records.popleft()
                self._in_write += 1
                lines.setdefault(record["rank"], []).append(_ENCODE(record) + "\n")
            for rank, written in lines.items():
                try:
                    self._append(self._path(rank), "".join(written))
                except OSError:
                    self.lost += len(written)
                self._in_write -= len(written)

    def _path(self, rank: object) -> Path:
        return self._directory / (f"rank-{rank}.jsonl" if isinstance(rank, int) else f"{rank}.jsonl")


def resident_bytes() -> int:
    """Return the physical memory of this process, or its maximum so far if the system reports no more."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seconds_without_core() -> float:
    """Return for how long this thread could run but had no core. 0 if unknown.

    Takes 5 microseconds, and 20 with :class:`pathlib.Path`.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        try:
            return int(os.read(file, 64).split()[1]) / 1e9
        finally:
            os.close(file)
    except (OSError, ValueError, IndexError):
        return 0.0


def _line_end(file: BinaryIO) -> bytes:
    """Return a newline if the file's last line is incomplete: an earlier worker of this rank may have been killed."""
    if not file.seek(0, os.SEEK_END):
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"
