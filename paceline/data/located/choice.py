"""Choice of ``move="auto"``: whether samples are sent to workers that have too few, by the times of steps.

::

    steps 0 ... 9     nothing is sent     a step takes 1.2 s, and the largest share is 2.0 times an even one: try it
    steps 10 ... 19   samples are sent    a step takes 0.7 s: go on

The time of a step has all that decides: how long the largest share takes, how many bytes a sample has, how fast the
links are, and what reading for others costs the worker that has the shard. Workers decide alike, because each knows the
times of all, and no change concerns a step whose microbatches a worker has asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from paceline.data.order import UNKNOWN
from paceline.schedule.placement import moves, place

STEPS = 8  # measured steps of each kind. The one before them is not counted
_WORTH = 0.97  # send samples if a step takes at most this fraction of its time without
Readers = tuple[tuple[int, ...], ...]


class MoveChoice:
    """Times of steps in which no sample is sent, then of steps in which samples are sent.

    Attributes:
        sending: steps in which samples are sent.
        sends: whether samples are sent from the end of ``sending`` on. None if the workers have not decided.
    """

    def __init__(self, sends: bool | None = None) -> None:
        self.sending, self.sends = range(UNKNOWN if sends else 0), sends
        self._first = 0  # step before those that are measured
        self._seconds: list[float] = []
        self._without = 0.0
        self._newest, self._began = -1, 0.0

    def begin(self, step: int, now: float) -> bool:
        """Record the beginning of a step, and return whether enough steps have been measured to go on."""
        if self.sends is not None or step == self._newest:  # the next phase of a step
            return False
        if self._newest < 0:
            self._first = step
        elif step == self._newest + 1 and self._newest > self._first:
            self._seconds.append(now - self._began)
        self._newest, self._began = step, now
        return len(self._seconds) >= STEPS

    @property
    def seconds(self) -> float:
        """Median time of the measured steps."""
        return median(self._seconds)

    def go_on(self, seconds: float, step: int, readers: Sequence[Readers], workers: int) -> str:
        """Go on to the next kind of steps, or decide, and return what to tell. Equal on all workers.

        Args:
            seconds: time of a measured step on the slowest worker.
            step: first step whose microbatches no worker has asked for.
            readers: ranks that have each microbatch of the newest steps.
        """
        self._seconds.clear()
        if not self.sending:
            if not any(moves(one, workers) for one in readers):  # nothing would be sent
                return ""
            most = sum(max(map(len, place(one, workers))) for one in readers)
            uneven = most / sum(-(-len(one) // workers) for one in readers)
            self._without, self._first, self.sending = seconds, step, range(step, UNKNOWN)
            return f"from step {step}: the largest share is {uneven:.1f} times an even one: trying to send samples"
        self.sends = seconds <= _WORTH * self._without
        self.sending = range(self.sending.start, UNKNOWN if self.sends else step)
        ratio = seconds / self._without
        what = "they are sent" if self.sends else f"none is sent from step {step} on"
        return f"with samples sent to other workers, a step takes {ratio:.2f} times as long: {what} (move='auto')"
