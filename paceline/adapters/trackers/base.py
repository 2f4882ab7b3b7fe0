"""Interface of trackers. Each tracker is a file in ``adapters``, imported only if it is requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Values:
    """Values of one step.

    Attributes:
        step: number of the step, from 0.
        time: time in seconds since 1970.
        scalars: numbers by name.
        texts: paths of text files by name.
        images: paths of PNG files by name.
    """

    step: int
    time: float
    scalars: Mapping[str, float]
    texts: Mapping[str, str]
    images: Mapping[str, str]


@dataclass(frozen=True)
class TrackedRun:
    """Run that a tracker records.

    Attributes:
        id: 16 hex digits, which stay the same after a resume or a change of rank 0.
        project: project of the run.
        name: display name.
        directory: directory of the trackers, which runs share.
        folder: folder of this run in ``directory``.
        position: number of completed steps, which is also the number of the next step.
        settings: values by dotted key, with secrets masked.
        sources: source of each setting.
        environment: versions, workers and the commit.
    """

    id: str
    project: str
    name: str
    directory: Path
    folder: Path
    position: int
    settings: Mapping[str, object]
    sources: Mapping[str, str]
    environment: Mapping[str, object]

    def about(self) -> dict[str, object]:
        """Return the settings and the environment under one set of names."""
        return {**self.settings, **{f"environment.{name}": value for name, value in self.environment.items()}}


class Tracker:
    """Recorder of values. A single thread calls all methods, which may block. An error stops only this tracker.

    Attributes:
        rewinds: whether opening removes the records of ``run.position`` and later steps. Otherwise the first value
            that was recorded for a step stays.
    """

    rewinds = False

    def write(self, values: Sequence[Values]) -> None:
        """Record values in ascending order of their steps."""
        raise NotImplementedError

    def files(self) -> Sequence[Path]:
        """Return the growing files, which are truncated to their last known sizes after a process was killed."""
        return ()

    def close(self) -> None:
        """Send the remaining values."""
