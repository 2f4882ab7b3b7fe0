"""From the events of this worker to the trackers: if it is rank 0, and from where the one before it was."""

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


class Feed:
    """Listens to the event log. Each worker keeps its last values; rank 0 hands them to a thread for each tracker.

    When another worker becomes rank 0 it opens the trackers at the same run, and begins with the values that the one
    before may not have sent: its own, and those in the event files.

    Args:
        names: of the trackers.
        events: the folder of the event files, if any.
        closing_seconds: how long the end of the script waits for all trackers together.
    """

    def __init__(self, names: tuple[str, ...], events: Path | None, closing_seconds: float) -> None:
        self._closing_seconds = closing_seconds
        self._names = names
        self._events = events
        self._run: TrackedRun | None = None
        self._senders: list[Sender] = []
        self._ending: list[Sender] = []
        self._recent: deque[Values] = deque(maxlen=_RECENT)

    def begin(self, run: TrackedRun, first: bool) -> None:
        """Begin when the position is known; ``first``: this worker is rank 0."""
        self._run = run
        if first:
            self._open()

    def offer(self, record: Mapping[str, Any]) -> None:
        """Take a record of the event log; never waits."""
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
        """Another worker is rank 0 now."""
        for sender in self._senders:
            sender.finish()
        self._ending += self._senders
        self._senders = []

    def _close_last(self) -> None:
        """Let the end of the process come here before the library of a tracker, which has just set up its own."""
        atexit.unregister(self.close)
        atexit.register(self.close)

    def close(self) -> None:
        """Let the trackers send what is left, for some seconds."""
        self._leave()
        until = time.monotonic() + self._closing_seconds
        for sender in self._ending:
            sender.join(until)
        self._ending.clear()


def describe(run: TrackedRun) -> TrackedRun:
    """Write what the run is to ``run.json``, and add the commit of the script."""
    run.folder.mkdir(parents=True, exist_ok=True)
    commit = _commit(Path(str(run.environment.get("script", "."))).parent)
    if commit:
        run = replace(run, environment={**run.environment, "commit": commit})
    path = run.folder / "run.json"
    if not path.exists():
        about: dict[str, object] = {"id": run.id, "project": run.project, "name": run.name}
        about |= {"settings": run.settings, "sources": run.sources, "environment": run.environment}
        path.write_text(json.dumps(about, indent=1, default=str))
    return run


def _commit(folder: Path) -> str:
    """Return the commit that a folder is at, ``-dirty`` behind it if files have changed; empty if unknown."""
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
