"""Durations of a worker's step."""

from __future__ import annotations

from typing import NamedTuple


class Times(NamedTuple):
    """Durations of a worker's step, in seconds."""

    script: float  # since the last step: the script, evaluations, saves
    load: float  # waiting for data
    compute: float  # the rest of its own time
    awaited: float  # waiting for other workers
    update: float = 0.0  # the optimizer's update

    @property
    def own(self) -> float:
        """Time in which this worker waited for no other."""
        return self.script + self.load + self.compute + self.update

    def beyond(self, usual: Times) -> dict[str, float]:
        """Return the seconds of each kind of its own time beyond the usual."""
        return {name: getattr(self, name) - getattr(usual, name) for name in ("script", "load", "compute", "update")}
