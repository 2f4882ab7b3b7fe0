"""Feed of events to the trackers on rank 0, which continues where the previous rank 0 stopped."""

from __future__ import annotations

import atexit
import json
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.adapters.trackers.base import TrackedRun, Values
from paceline.adapters.trackers.sender import Sender
from paceline.adapters.trackers.values import WITH_VALUES, recorded, values_of

_RECENT = 2048
_CLOSING_SECONDS = 30.0  # timeout for all trackers together at the end of the script


class Feed:
    """Listener of the event log. Each worker keeps its last values; rank 0 passes them to a thread for each tracker.

    A worker that becomes rank 0 opens the trackers of the same run. It first sends the values that the previous rank 0
    may not have sent, from its own memory and from the event files.
    """

    def __init__(self, names: tuple[str, ...], events: Path | None) -> None:
        self._names, self._events = names, events
        self._run: TrackedRun | None = None
        self._senders: list[Sender] = []
        self._ending: list[Sender] = []
        self._recent: deque[Values] = deque(maxlen=_RECENT)

    def begin(self, run: TrackedRun, first: bool) -> None:
        """Start once the position is known. Open the trackers if this worker is rank 0 (``first``)."""
        self._run = run
        if first:
            self._open()

    def offer(self, record: Mapping[str, Any]) -> None:
        """Process a record of the event log without waiting."""
        event = record["event"]
        if event in WITH_VALUES:
            values = values_of(record)
            self._recent.append(values)
            for sender in self._senders:
                sender.offer(values)
        elif event == "recovered" and self._run is not None:
            self._run = replace(self._run, position=record["step"])
            if record["rank"] != 0:
                self._leave()
            elif not self._senders:
                self._open()

    def _open(self) -> None:
        assert self._run is not None
        run, recent = self._run, list(self._recent)
        prepared = threading.Lock()

        def prepare() -> tuple[TrackedRun, list[Values]]:
            with prepared:
                about = describe(run)
            before = recorded(self._events, run.id, run.position) if self._events else []
            return about, sorted([*before, *recent], key=lambda values: values.step)

        self._senders = [Sender(name, prepare, self._close_last) for name in self._names]

    def _leave(self) -> None:
        """Request the end of the senders without waiting for them."""
        for sender in self._senders:
            sender.finish()
        self._ending += self._senders
        self._senders = []

    def _close_last(self) -> None:
        """Register :meth:`close` again, so that it runs at exit before the handlers of a tracker's library."""
        atexit.unregister(self.close)
        atexit.register(self.close)

    def close(self) -> None:
        """Wait until the trackers have sent their remaining values, for at most ``_CLOSING_SECONDS``."""
        self._leave()
        until = time.monotonic() + _CLOSING_SECONDS
        for sender in self._ending:
            sender.join(until)
        self._ending.clear()


def describe(run: TrackedRun) -> TrackedRun:
    """Write the description of a run to ``run.json``, and return the run with the commit of the script."""
    run.folder.mkdir(parents=True, exist_ok=True)
    if commit := _commit(Path(str(run.environment.get("script", "."))).parent):
        run = replace(run, environment={**run.environment, "commit": commit})
    path = run.folder / "run.json"
    if not path.exists():
        about: dict[str, object] = {"id": run.id, "project": run.project, "name": run.name}
        about |= {"settings": run.settings, "sources": run.sources, "environment": run.environment}
        path.write_text(json.dumps(about, indent=1, default=str))
    return run


def _commit(folder: Path) -> str:
    """Return the commit of a folder, followed by ``-dirty`` if files have changed, or an empty string if unknown."""
    try:
        asked = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""
