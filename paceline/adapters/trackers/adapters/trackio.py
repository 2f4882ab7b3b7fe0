"""trackio: a local store in TRACKIO_DIR."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trackio

from paceline.adapters.trackers.base import TrackedRun, Tracker, Values


class TrackioTracker(Tracker):
    """Tracker that logs to a trackio run, which is identified by its name."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, values: Sequence[Values]) -> None:
        """Log the values of each step."""
        for one in values:
            texts = {name: Path(path).read_text() for name, path in one.texts.items()}
            images = {name: trackio.Image(path) for name, path in one.images.items()}
            self._run.log({**one.scalars, **texts, **images}, step=one.step)

    def close(self) -> None:
        """Write the remaining values and end the run."""
        self._run.finish()


def open_tracker(run: TrackedRun) -> Tracker:
    """Create the run or continue it."""
    return TrackioTracker(
        trackio.init(project=run.project, name=f"{run.name}-{run.id[:8]}", config=run.about(), resume="allow")
    )
