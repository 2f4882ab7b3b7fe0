"""Progress of training, read from the events of rank 0 and shown as a bar or as lines."""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from paceline.errors import counted
from paceline.system.regular_files import open_regular

_POLL_SECONDS = 0.25
_LINE_SECONDS = 10.0
_MOST_METRICS, _LONGEST_NAME = 3, 20
_MOST_LINES = 100
_WINDOW = 50  # steps over which the time left is estimated


class EventTail:
    """Reader of the records that a worker appends to its event file after construction."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._open = b""

    def read(self) -> list[dict[str, object]]:
        """Return the new records. An incomplete line waits for the next call."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._open = (self._open + data).split(b"\n")
        return [record for line in lines if (record := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, object] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class Progress:
    """Progress according to the records read."""

    def __init__(self) -> None:
        self.done = 0  # completed steps
        self.steps: int | None = None
        self._loss: float | None = None
        self._metrics: dict[str, float] = {}
        self._speed: float | None = None
        self._times: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def take(self, record: Mapping[str, object]) -> None:
        """Update the progress from a record. Events other than steps and loops are ignored."""
        if record.get("event") == "batches":
            self.done = int(_number(record.get("position")) or 0)
            steps = _number(record.get("steps"))
            self.steps = None if steps is None else int(steps)
        elif record.get("event") == "step":
            self.done = int(_number(record.get("step")) or 0) + 1
            self._loss = _number(record.get("loss"))
            metrics = record.get("metrics")
            found = {str(name): _number(value) for name, value in metrics.items()} if isinstance(metrics, dict) else {}
            self._metrics = {name: value for name, value in found.items() if value is not None}
            self._speed = _number(record.get("samples_per_second"))
            self._times.append((self.done, _number(record.get("time")) or time.time()))

    def seconds_left(self) -> float | None:
        """Return the seconds left at the pace of the last steps, including everything between them, or None."""
        if self.steps is None or len(self._times) < 2:
            return None
        (first, begin), (last, end) = self._times[0], self._times[-1]
        return (self.steps - last) * (end - begin) / (last - first) if last > first else None

    def text(self) -> str:
        """Return a line like ``step 120/500  loss 0.31  accuracy 0.9  4100 samples/s  time left 0:00:42``."""
        parts = [f"step {self.done}" + (f"/{self.steps}" if self.steps is not None else "")]
        return "  ".join(parts + self.details())

    def details(self) -> list[str]:
        """Return the known values of the loss, the metrics, the speed and the time left, as strings."""
        parts = []
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4g}")
        parts += [f"{name[:_LONGEST_NAME]} {value:.4g}" for name, value in list(self._metrics.items())[:_MOST_METRICS]]
        if self._speed is not None:
            parts.append(f"{self._speed:.0f} samples/s" if self._speed >= 10 else f"{self._speed:.2g} samples/s")
        if (left := self.seconds_left()) is not None:
            parts.append(f"time left {datetime.timedelta(seconds=round(max(0.0, left)))}")
        return parts


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


class Display:
    """Display of rank 0's output. As a context manager it also reads the events. Two subclasses show progress."""

    introduces = False
    """Whether to report a slow start of workers, and the first note of a session: workers and strategy."""

    def __init__(self, events: Path, alerts: Callable[[], list[str]] = list) -> None:
        self.progress = Progress()
        self.printed: list[str] = []  # first lines of rank 0's standard output
        self._alerts = alerts
        self._tail = EventTail(events)
        self._starting: tuple[int, float] | None = None  # number of workers, start time
        self._starts = False
        self._drawn = time.monotonic(), 0  # time of the last line of progress, and its number of steps
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-progress", daemon=True)

    def relay(self, name: str, line: str) -> None:
        """Print a line of rank 0 and remember it."""
        if name == "stdout" and len(self.printed) < _MOST_LINES:
            self.printed.append(line)
        self.show(name, line)

    def show(self, name: str, line: str) -> None:
        """Print a line of rank 0 to the stream to which rank 0 printed it, ``stdout`` or ``stderr``."""
        with self._lock:
            _write(sys.stdout if name == "stdout" else sys.stderr, f"[rank 0] {line}\n")

    def tell(self, line: str) -> None:
        """Print a line about the run."""
        with self._lock:
            _write(sys.stderr, f"{line}\n")

    def draw(self) -> None:
        """Show the progress. Called several times a second."""

    def __enter__(self) -> Display:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        closed = False
        while not closed:
            closed = self._closed.wait(_POLL_SECONDS)
            for record in self._tail.read():
                self.progress.take(record)
                self._introduce(record)
            self._tell_starting()
            for line in self._alerts():
                self.tell(line)
            self.draw()

    def starting(self, workers: int) -> None:
        """Record that workers are starting, which may take long because of their imports."""
        self._starting = workers, time.monotonic()

    def _tell_starting(self) -> None:
        if self._starting is None or time.monotonic() - self._starting[1] < _LINE_SECONDS:
            return
        workers, self._starting = self._starting[0], None
        if self.introduces and workers:
            self.tell(f"starting {counted(workers, 'worker')}: none has reached paceline.start yet")

    def _introduce(self, record: Mapping[str, object]) -> None:
        self._starting = None
        if record.get("event") == "start":
            self._starts = True
        elif record.get("event") == "note" and self._starts:
            self._starts = False
            if self.introduces:
                self.tell(str(record.get("text")))


class LineDisplay(Display):
    """Display without a terminal, which prints the progress on stderr every ten seconds."""

    introduces = True

    def draw(self) -> None:
        now, (last, done) = time.monotonic(), self._drawn
        if now - last >= _LINE_SECONDS and self.progress.done != done:
            self._drawn = now, self.progress.done
            with self._lock:
                _write(sys.stderr, self.progress.text() + "\n")


class BarDisplay(Display):
    """Display on a terminal, with a bar below the lines of rank 0."""

    introduces = True

    def __init__(self, events: Path, alerts: Callable[[], list[str]] = list) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        super().__init__(events, alerts)
        self._console = Console(stderr=True)
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[details]}"))
        self._bar = Bar(
            *columns, console=self._console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._bar.add_task("", total=None, details="starting", visible=False)

    def show(self, name: str, line: str) -> None:
        from rich.text import Text

        if name == "stdout" and not sys.stdout.isatty():
            super().show(name, line)
        else:
            self._console.print(Text("[rank 0] ") + Text.from_ansi(line), soft_wrap=True)

    def tell(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text(line), soft_wrap=True)

    def draw(self) -> None:
        details = "  ".join(self.progress.details())
        total, done = self.progress.steps, self.progress.done
        self._bar.update(
            self._task, total=total, completed=done, details=details, visible=bool(done or total is not None)
        )

    def __enter__(self) -> Display:
        self._bar.start()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__()
        self._bar.stop()


def display(events: Path, quiet: bool, alerts: Callable[[], list[str]] = list) -> Display:
    """Return the display that fits stderr. ``alerts`` returns lines to print beside the progress."""
    if quiet:
        return Display(events, alerts)
    return BarDisplay(events, alerts) if sys.stderr.isatty() else LineDisplay(events, alerts)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text.encode(stream.encoding or "utf-8", "replace").decode(stream.encoding or "utf-8"))
        stream.flush()
    except BrokenPipeError:  # the reader has gone (`| head`): keep training, discard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
