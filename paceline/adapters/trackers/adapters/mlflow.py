"""MLflow: a run found by its tag in the store of MLFLOW_TRACKING_URI, which defaults to mlflow.db in the directory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from paceline.adapters.trackers.base import TrackedRun, Tracker, Values

_TAG = "paceline.run"
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # maximum number of items in a call


class MlflowTracker(Tracker):
    """Tracker that logs to an MLflow run."""

    def __init__(self, client: Any, run: str) -> None:
        self._client, self._run = client, run

    def write(self, values: Sequence[Values]) -> None:
        metrics = [
            Metric(_name(name), value, int(one.time * 1000), one.step)
            for one in values
            for name, value in one.scalars.items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MOST_METRICS])
        for one in values:
            for path in (*one.texts.values(), *one.images.values()):
                self._client.log_artifact(self._run, path)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


def _name(name: str) -> str:
    """Return a name with underscores instead of characters that MLflow does not accept."""
    return "".join(one if one.isalnum() or one in "_-. :/" else "_" for one in name)


def open_tracker(run: TrackedRun) -> Tracker:
    """Find the run, or create it with the settings as parameters."""
    server = artifacts = None
    if not mlflow.is_tracking_uri_set():
        server, artifacts = f"sqlite:///{run.directory}/mlflow.db", (run.directory / "mlflow").as_uri()
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name(run.project)
    number = client.create_experiment(run.project, artifacts) if experiment is None else experiment.experiment_id
    if found := client.search_runs([number], f"tags.`{_TAG}` = '{run.id}'", max_results=1):
        client.update_run(found[0].info.run_id, status="RUNNING")
        return MlflowTracker(client, found[0].info.run_id)
    made = client.create_run(number, run_name=run.name, tags={_TAG: run.id}).info.run_id
    settings = [Param(name, str(value)[:6000]) for name, value in run.about().items()]
    for start in range(0, len(settings), _MOST_PARAMS):
        client.log_batch(made, params=settings[start : start + _MOST_PARAMS])
    sources = [RunTag(f"source.{name}", source) for name, source in run.sources.items() if source != "default"]
    client.log_batch(made, tags=sources)
    return MlflowTracker(client, made)
