"""Thread of one tracker, which takes values from a bounded queue so that training never waits for it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.adapters.trackers.base import TrackedRun, Tracker, Values
from paceline.adapters.trackers.registry import open_tracker, rewinds


class Ledger:
    """Small file beside a tracker's output, with the current writer, the last step of each name and the file sizes.

    A worker that was dropped while it hung may resume. It then sees that another worker is the writer, and stops.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = secrets.token_hex(8)
        self.last: dict[str, int] = {}

    def take(self, folder: Path, below: int | None) -> None:
        """Become the writer, and truncate files to their known sizes.

        Args:
            below: first step whose records are forgotten. None keeps all records.
        """
        known = self._read()
        self.last = dict(known.get("last", {}))
        if below is not None:
            self.last = {name: min(step, below - 1) for name, step in self.last.items()}
        self._write(known.get("files", {}))
        for name, size in known.get("files", {}).items():
            with contextlib.suppress(FileNotFoundError):
                if (folder / name).stat().st_size > size:
                    os.truncate(folder / name, size)

    @property
    def owned(self) -> bool:
        """Whether this worker is still the writer."""
        return self._read().get("owner") == self._owner

    def save(self, folder: Path, files: Iterable[Path]) -> None:
        """Record the last steps and the file sizes, unless another writer has taken over."""
        if self.owned:
            self._write({str(path.relative_to(folder)): path.stat().st_size for path in files})

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _write(self, files: Mapping[str, int]) -> None:
        beside = self._path.with_suffix(f".{self._owner}")
        beside.write_text(json.dumps({"owner": self._owner, "last": self.last, "files": files}))
        beside.replace(self._path)


_log = logging.getLogger("paceline")
_MOST_WAITING = 10_000
_MOST_AT_ONCE = 500
_SECONDS = 0.2


class Sender:
    """Sender of values to one tracker. The steps of each name must ascend, and repeated steps are dropped.

    Args:
        prepare: called first, by the thread. Returns the run and the values that may not have been recorded yet.
        opened: called by the thread after the tracker has been opened.
    """

    def __init__(
        self, name: str, prepare: Callable[[], tuple[TrackedRun, list[Values]]], opened: Callable[[], None]
    ) -> None:
        self.name, self._prepare, self._opened = name, prepare, opened
        self._waiting: deque[Values] = deque()
        self._lost = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"paceline-{name}", daemon=True)
        self._thread.start()

    def offer(self, values: Values) -> None:
        """Queue values without waiting. Values are lost if the queue is full."""
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(values)
            return
        self._lost += 1
        if self._lost == 1 and self._thread.is_alive():
            _log.warning(
                "tracker %s is behind by %d records: records are not stored there until it has caught up",
                *(self.name, _MOST_WAITING),
            )

    def finish(self) -> None:
        """Ask the thread to end after it has sent all queued values."""
        self._closed.set()

    def join(self, until: float) -> None:
        """Wait for the end of the thread, at most until a time of ``time.monotonic``."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            _log.warning("tracker %s did not finish before the end of the script: its last values are lost", self.name)

    def _work(self) -> None:
        try:
            self._send()
        except Exception as error:  # noqa: BLE001 - a tracker's library may raise any exception; training continues
            _log.warning("tracker %s failed and is off from now on: %s: %s", self.name, type(error).__name__, error)
            while not self._closed.wait(_SECONDS):
                self._waiting.clear()

    def _send(self) -> None:
        run, before = self._prepare()
        ledger = Ledger(run.folder / f"{self.name}.json")
        ledger.take(run.folder, run.position if rewinds(self.name) else None)
        tracker = open_tracker(self.name, run)
        ledger.save(run.folder, tracker.files())  # so that even a first write cut short by a kill can be truncated
        self._opened()
        self._hand_over(tracker, ledger, run, before)
        while True:
            ended = self._closed.wait(_SECONDS)
            while self._waiting:
                some = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST_AT_ONCE))]
                if not self._hand_over(tracker, ledger, run, some):
                    return
            if ended:
                tracker.close()
                ledger.save(run.folder, tracker.files())
                return

    def _hand_over(self, tracker: Tracker, ledger: Ledger, run: TrackedRun, some: Iterable[Values]) -> bool:
        """Record new values. Return whether this worker is still the writer."""
        new = [one for values in some if (one := _new(values, ledger.last)) is not None]
        if not ledger.owned:
            return False
        if new:
            tracker.write(new)
            ledger.save(run.folder, tracker.files())
        return True


def _new(values: Values, last: dict[str, int]) -> Values | None:
    """Return the values whose step is later than the last step of their name, and update the last steps."""

    def later(named: Iterable[str]) -> set[str]:
        return {name for name in named if last.get(name, -1) < values.step}

    if not (names := later({*values.scalars, *values.texts, *values.images})):
        return None
    last.update(dict.fromkeys(names, values.step))
    kept = [{k: v for k, v in one.items() if k in names} for one in (values.texts, values.images)]
    return Values(values.step, values.time, {k: v for k, v in values.scalars.items() if k in names}, *kept)
