"""What happens, as records: one JSON object per line, one file per rank.

A record has ``time`` (seconds since 1970), ``event``, ``rank``, ``generation`` (how often the workers were started
anew), and what belongs to the event: ``step``, ``seconds``, ``bytes``, ... Training hands a record over in about a
microsecond; a thread writes it. A full disk or a closed file loses records, never a step: the number lost stands in the
last record.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FLUSH_SECONDS = 0.2


class EventLog:
    """Writes the records of one rank to ``<directory>/rank-<rank>.jsonl``; without a directory, nowhere."""

    def __init__(self, directory: Path | None, rank: int, generation: int = 0) -> None:
        self.rank = rank
        self.generation = generation
        self.lost = 0
        self._records: deque[dict[str, object]] = deque()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._path = directory / f"rank-{rank}.jsonl"
            self._thread = threading.Thread(target=self._write_until_closed, name="paceline-events", daemon=True)
            self._thread.start()

    def mark(self, event: str, **fields: object) -> None:
        """Record that something happened now."""
        if self._thread is not None:
            self._records.append(self._record(event, fields))

    def _record(self, event: str, fields: dict[str, object]) -> dict[str, object]:
        return {"time": time.time(), "event": event, "rank": self.rank, "generation": self.generation, **fields}

    @contextmanager
    def span(self, event: str, **fields: object) -> Iterator[None]:
        """Record how long the body took, also when it raises."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.mark(event, **fields, seconds=time.perf_counter() - begin)

    def close(self) -> None:
        """Write what is left and stop the thread."""
        if self._thread is not None:
            self._closed.set()
            self._thread.join(timeout=5)
            self._thread = None

    def _write_until_closed(self) -> None:
        while not self._closed.wait(_FLUSH_SECONDS):
            self._write_waiting()
        if self.lost:
            self._records.append(self._record("lost-records", {"count": self.lost}))
        self._write_waiting()

    def _write_waiting(self) -> None:
        lines = []
        while self._records:
            lines.append(json.dumps(self._records.popleft(), default=str))
        if not lines:
            return
        try:
            with self._path.open("a") as file:
                file.write("\n".join(lines) + "\n")
        except OSError:
            self.lost += len(lines)
