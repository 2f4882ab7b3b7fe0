"""Interface of trackers. Each tracker is a file in ``adapters``, imported only if it is requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Values:
    """Values to record for one step."""

    step: int  # number of the step, from 0
    time: float  # time in seconds since 1970
    scalars: Mapping[str, float]  # numbers by name
    texts: Mapping[str, str]  # paths of text files by name
    images: Mapping[str, str]  # paths of PNG files by name


@dataclass(frozen=True)
class TrackedRun:
    """Run that a tracker records."""

    id: str  # 16 hex digits, which stay the same after a resume or a change of rank 0
    project: str
    name: str  # display name
    directory: Path  # directory of the trackers, which runs share
    folder: Path  # folder of this run in ``directory``
    position: int  # number of completed steps, which is also the number of the next step
    settings: Mapping[str, object]  # values by dotted key, with secrets masked
    sources: Mapping[str, str]  # source of each setting
    environment: Mapping[str, object]  # versions, workers and the commit

    def about(self) -> dict[str, object]:
        """Return the settings and the environment under one set of names."""
        return {**self.settings, **{f"environment.{name}": value for name, value in self.environment.items()}}


class Tracker:
    """Recorder of values. A single thread calls all methods, which may block. An error stops only this tracker."""

    def write(self, values: Sequence[Values]) -> None:
        """Record values in ascending order of their steps."""
        raise NotImplementedError

    def files(self) -> Sequence[Path]:
        """Return the files that this tracker appends to. After a kill they are truncated to their last known sizes."""
        return ()

    def close(self) -> None:
        """Send the remaining values."""
