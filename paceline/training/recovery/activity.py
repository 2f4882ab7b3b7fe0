"""Current activity of this worker, for hang detection."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from paceline.comm.world import World

RE_FORMING = "re-forming"
_RECENT_STEPS = 20


class Activity:
    """Current activity of this worker and its start time. The coordinator client's thread reports it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._now = "starting", world.clock(), False
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def begin(self, what: str, busy: bool = False) -> None:
        """Begin an activity. A ``busy`` one may take long, and is not a hang as long as heartbeats arrive."""
        self._now = what, self._world.clock(), busy

    def step_done(self, seconds: float) -> None:
        """Record the duration of a completed step, in seconds."""
        self._step_seconds.append(seconds)

    def status(self, step: int) -> dict[str, Any]:
        """Return the status of a heartbeat, which the coordinator needs for hang detection."""
        what, since, busy = self._now
        awaited = self._world.awaited
        if awaited.ranks:
            what, since = self._world.doing(), awaited.since
        return {
            "step": step,
            "doing": what,
            "waiting": bool(awaited.ranks) or what == RE_FORMING,
            "busy": busy,
            "since": self._world.clock() - since,
            "step_seconds": median(self._step_seconds) if self._step_seconds else None,
        }
