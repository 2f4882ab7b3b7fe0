"""Trackers by name, and the check for the packages that they need."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec

from paceline.adapters.trackers.base import TrackedRun, Tracker
from paceline.errors import ConfigError

_PACKAGES = {
    "comet": "comet_ml",
    "csv": "",
    "mlflow": "mlflow",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""Package that each tracker imports. Its extra has the name of the tracker."""


def check(names: Iterable[str]) -> None:
    """Check that the packages of the trackers are installed. Raises ConfigError if a package is not installed."""
    for name in names:
        package = _PACKAGES[name]
        if package and find_spec(package) is None:
            raise ConfigError(
                f"trackers: {name!r} needs {package}, which is not installed: pip install 'paceline[{name}]'."
            )


def rewinds(name: str) -> bool:
    """Return whether opening a tracker removes the records of ``run.position`` and later steps.

    Otherwise the first value that was recorded for a step stays.
    """
    return name in ("csv", "tensorboard")


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Open a tracker for a run, which may already have records of this tracker."""
    module = "csv_file" if name == "csv" else name
    opened = import_module(f"paceline.adapters.trackers.adapters.{module}").open_tracker(run)
    assert isinstance(opened, Tracker)
    return opened
