"""Weights & Biases: online, or offline with WANDB_MODE=offline."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from paceline.adapters.trackers.base import TrackedRun, Tracker, Values


class WandbTracker(Tracker):
    """Tracker that logs to a Weights & Biases run, whose ID is that of the Paceline run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, values: Sequence[Values]) -> None:
        """Log the values of each step. Weights & Biases merges several calls for a step."""
        for one in values:
            texts = {
                name: wandb.Html(f"<pre>{html.escape(Path(path).read_text())}</pre>")
                for name, path in one.texts.items()
            }
            images = {name: wandb.Image(path) for name, path in one.images.items()}
            self._run.log({**one.scalars, **texts, **images}, step=one.step)

    def close(self) -> None:
        """Send the remaining values and end the run."""
        self._run.finish()


def open_tracker(run: TrackedRun) -> Tracker:
    """Create the run or continue it."""
    quiet = wandb.Settings(console="off", silent=True)
    known: dict[str, Any] = {"id": run.id, "resume": "allow", "project": run.project, "name": run.name}
    return WandbTracker(wandb.init(**known, dir=str(run.folder), config=run.about(), settings=quiet))
