"""Comet: online with an API key, otherwise offline in archives for `comet upload`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import comet_ml

from paceline.adapters.trackers.base import TrackedRun, Tracker, Values


class CometTracker(Tracker):
    """Tracker that logs to a Comet experiment."""

    def __init__(self, experiment: Any) -> None:
        self._experiment = experiment

    def write(self, values: Sequence[Values]) -> None:
        """Log the values of each step."""
        for one in values:
            self._experiment.log_metrics(dict(one.scalars), step=one.step)
            for name, path in one.texts.items():
                self._experiment.log_text(Path(path).read_text(), step=one.step, metadata={"name": name})
            for name, path in one.images.items():
                self._experiment.log_image(path, name=name, step=one.step)

    def close(self) -> None:
        """Send all values, or write the archive if offline."""
        self._experiment.end()


def open_tracker(run: TrackedRun) -> Tracker:
    """Create the experiment or continue it."""
    online = bool(comet_ml.get_config("comet.api_key"))
    folder = run.folder / "comet"
    folder.mkdir(exist_ok=True)
    quiet = {"auto_output_logging": "", "auto_metric_logging": False, "auto_param_logging": False}
    settings = comet_ml.ExperimentConfig(
        name=run.name, display_summary_level=0, offline_directory=str(folder), log_git_patch=False, **quiet
    )
    experiment = comet_ml.start(
        project_name=run.project,
        experiment_key=(run.id * 4)[:32],
        mode="get_or_create",
        online=online,
        experiment_config=settings,
    )
    experiment.log_parameters(run.about())
    return CometTracker(experiment)
