"""Output of workers: copied unchanged to a log file, and passed line by line to a display callback."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator

Show = Callable[[str, str], None]
"""Callback for one line of ``stdout`` or ``stderr``. Each of the two streams calls it from its own thread."""

_LONGEST_LINE = 1 << 20
_MOST_WAITING = 10_000
_LAST_SECONDS = 2.0
_TURN_SECONDS = 0.1


class Lines:
    """Incremental splitter of a byte stream into lines.

    A carriage return restarts the line, as on a terminal, so all states of a progress bar are a single line.
    """

    def __init__(self) -> None:
        self._open = b""

    def take(self, data: bytes) -> list[str]:
        """Add bytes. Return the lines that they complete."""
        *complete, self._open = (self._open + data).split(b"\n")
        restart = self._open.rfind(b"\r", 0, -1)  # a trailing "\r" may belong to a "\n" that has not arrived yet
        self._open = self._open[restart + 1 :]
        if len(self._open) > _LONGEST_LINE:
            complete.append(self._open)
            self._open = b""
        return [_text(line) for line in complete]

    def rest(self) -> list[str]:
        """Return the unterminated last line, if any."""
        last, self._open = self._open, b""
        return [_text(last)] if last else []


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")


def ends_within(thread: threading.Thread, seconds: float) -> bool:
    """Wait for the end of a thread. Return False if it still runs.

    Waits in short turns. If this process is stopped meanwhile, it loses one turn, and the thread can still end.
    """
    for _ in range(math.ceil(seconds / _TURN_SECONDS)):
        thread.join(_TURN_SECONDS)
        if not thread.is_alive():
            return True
    return False


class Relay:
    """Non-blocking queue of lines to show. Lines are dropped if they arrive faster than they can be shown."""

    def __init__(self) -> None:
        self._lines: queue.Queue[tuple[str, str] | None] = queue.Queue(_MOST_WAITING)

    def put(self, name: str, line: str) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait((name, line))

    @contextlib.contextmanager
    def to(self, show: Show) -> Iterator[None]:
        """Show queued lines during the ``with`` block. On exit wait for the rest, with a timeout."""

        def run() -> None:
            while (found := self._lines.get()) is not None:
                show(*found)

        thread = threading.Thread(target=run, name="paceline-relay", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=_LAST_SECONDS)
            ends_within(thread, _LAST_SECONDS)


class Stream:
    """Thread that copies one pipe of a worker to its log and to ``show`` until the pipe ends, and then closes it."""

    def __init__(self, name: str, pipe: int, log: int, show: Show) -> None:
        self._thread = threading.Thread(
            target=self._copy, args=(name, pipe, log, show), name=f"paceline-{name}", daemon=True
        )
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait until the entire pipe is copied. Return False if a process still holds the pipe after `seconds`."""
        return ends_within(self._thread, seconds)

    @staticmethod
    def _copy(name: str, pipe: int, log: int, show: Show) -> None:
        lines, kept = Lines(), b""
        try:
            while data := os.read(pipe, 1 << 16):
                kept = _write_lines(log, kept + data)
                for line in lines.take(data):
                    show(name, line)
        finally:
            os.close(pipe)
        _write(log, kept)
        for line in lines.rest():
            show(name, line)


def _write_lines(log: int, data: bytes) -> bytes:
    """Write complete lines, so that lines of stdout and stderr do not interleave. Return the incomplete rest."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    if len(data) - end > _LONGEST_LINE:
        end = len(data)
    _write(log, data[:end])
    return data[end:]


def _write(log: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(log, data) :]
    except OSError:
        return  # a full disk must not stop training
