"""What a tracker is. Each is one file here, imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Values:
    """What is known of one step.

    Attributes:
        step: its number, from 0.
        time: in seconds since 1970.
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
    """The run that a tracker records.

    Attributes:
        id: 16 hex digits, the same after a resume, and whoever is rank 0.
        project: to which it belongs.
        name: for people.
        directory: of the trackers; runs share it.
        folder: in it, of this run alone.
        position: steps done; the next values are of this step.
        settings: each dotted key with its value; secrets are masked.
        sources: where each of them comes from.
        environment: versions, workers, the commit.
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
    """Records values somewhere. All is called by one thread, which may wait; an error ends this tracker alone.

    Attributes:
        rewinds: whether opening removes what is recorded of ``run.position`` and later steps; else the first value of
            a step stays.
    """

    rewinds = False

    def write(self, values: Sequence[Values]) -> None:
        """Record values, whose steps do not fall."""
        raise NotImplementedError

    def files(self) -> Sequence[Path]:
        """Return the files that grow: what a killed process has written behind their last known size is cut off."""
        return ()

    def close(self) -> None:
        """Send what is left."""
