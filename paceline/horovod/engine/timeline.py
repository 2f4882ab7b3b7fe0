"""Timeline of requested and executed operations, as a file for Perfetto or ``chrome://tracing``.

Each tensor has a row, as in Horovod (Trace Event Format, a JSON array that is valid after each event)::

    allreduce.x   NEGOTIATE_ALLREDUCE ┤0      ├1 ALLREDUCE
                  first request ──────┘        └ last request
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.horovod.engine.requests import Request

_END = b"\n]"


class Timeline:
    """Trace file of operations.

    Args:
        path: path of the file, which is overwritten.
        mark_cycles: whether each cycle of the negotiating thread is recorded, too.
    """

    def __init__(self, path: str, mark_cycles: bool) -> None:
        self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 - closed by close()
        self._lock = threading.RLock()
        self._marks, self._zero = mark_cycles, time.perf_counter_ns()
        self._rows: dict[str, int] = {}
        self._negotiated: set[str] = set()
        began = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._file.write(
            b"[\n" + json.dumps({"name": "process_name", "ph": "M", "pid": 0, "args": began}).encode() + _END
        )

    def cycle(self) -> None:
        """Record the start of a negotiation cycle if cycles are marked."""
        if self._marks:
            self._write({"ph": "i", "name": "CYCLE_START", "ts": self._now(), "s": "g"})

    def asked(self, request: Request, rank: int) -> None:
        row = self._row(request)
        if row not in self._negotiated:
            self._negotiated.add(row)
            self._event("B", row, f"NEGOTIATE_{request.kind.upper()}")
        self._event("X", row, str(rank), dur=0)

    def begin(self, requests: Iterable[Request]) -> None:
        """Record the end of the negotiation and the start of operations that all ranks have requested."""
        for one in requests:
            row = self._row(one)
            if row in self._negotiated:
                self._negotiated.discard(row)
                self._event("E", row)
            self._event("B", row, one.kind.upper())

    def end(self, requests: Iterable[Request]) -> None:
        for one in requests:
            self._event("E", self._row(one), args={"dtype": list(one.dtypes), "shape": list(one.shapes)})

    def close(self) -> None:
        """Close the file. Later events are dropped."""
        with self._lock:
            self._file.close()

    def _now(self) -> int:
        return (time.perf_counter_ns() - self._zero) // 1000

    def _row(self, request: Request) -> str:
        kind = request.kind
        return request.name if request.name.removeprefix("grouped_").startswith(kind) else f"{kind}.{request.name}"

    def _event(self, phase: str, row: str, name: str = "", **values: Any) -> None:
        named = {"name": name} if name else {}
        with self._lock:
            if row not in self._rows:
                number = self._rows[row] = len(self._rows) + 1
                self._write({"name": "process_name", "ph": "M", "pid": number, "args": {"name": row}})
                self._write({"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}})
            self._write({"ph": phase, **named, "ts": self._now(), "pid": self._rows[row], **values})

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.seek(-len(_END), 2)
                self._file.write(b",\n" + json.dumps(event).encode() + _END)


def open_timeline(path: str, mark_cycles: bool) -> Timeline:
    """Create a timeline file. Raises ConfigError if the file cannot be written."""
    try:
        return Timeline(path, mark_cycles)
    except OSError as error:
        raise ConfigError(f"The timeline {path!r} cannot be written: {error.strerror}.") from None
