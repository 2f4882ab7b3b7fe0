"""Choice of ``move="auto"``: whether samples are sent to workers that have too few, by the times of steps.

::

    steps 0 ... 9     nothing is sent     a step takes 1.3 s, and the largest share is 2.0 times an even one: try it
    steps 10 ... 19   samples are sent    a step takes 0.7 s: faster, or only later in the run?
    steps 20 ... 29   nothing is sent     a step takes 1.2 s: send samples from now on

The first steps of a run are slow for other reasons, too. So the trial is compared with the faster of the steps before
and after it. It ends the choice if it is not faster than the steps before it.

The time of a step reflects all that matters: the time of the largest share, the bytes of a sample, the speed of the
links, and the cost of reading for others to the worker that has the shard. Workers decide alike, because each knows the
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
    """Times of steps in which no sample is sent, of steps in which samples are sent, and again of the former.

    Attributes:
        sending: steps in which samples are sent.
        sends: decision of the workers. None before it.
    """

    def __init__(self, sends: bool | None = None) -> None:
        self.sending, self.sends = range(UNKNOWN if sends else 0), sends
        self._first = 0  # step before those that are measured
        self._seconds: list[float] = []
        self._without: list[float] = []  # time of a step in which no sample is sent, before and after the trial
        self._with = 0.0
        self._newest, self._began = -1, 0.0

    def begin(self, step: int, now: float) -> bool:
        """Record the beginning of a step, and return whether enough steps have been measured to decide."""
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
        """Begin the next kind of steps, or decide. Return the text to log, which is equal on all workers.

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
            self._without, self._first, self.sending = [seconds], step, range(step, UNKNOWN)
            return (
                f"move='auto': from step {step} on, samples are sent on trial, because the largest share is "
                f"{uneven:.1f} times an even one"
            )
        if self._with:
            self._without.append(seconds)
        else:
            self._with, self._first, self.sending = seconds, step, range(self.sending.start, step)
        ratio = self._with / min(self._without)
        if ratio <= _WORTH and len(self._without) == 1:
            return f"move='auto': from step {step} on, no sample is sent, to compare the times of steps once more"
        self.sends = ratio <= _WORTH
        if self.sends:
            self.sending = range(step, UNKNOWN)
        return (
            f"move='auto': from step {step} on, {'samples are' if self.sends else 'no sample is'} sent, because a step "
            f"with samples sent takes {ratio:.2f} times as long as one without"
        )
