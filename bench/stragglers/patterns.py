"""The patterns of slowness, and what workers of such speeds could do at best: pure functions of whole numbers.

A microbatch takes a worker ``base`` seconds times its slowdown, a function of (pattern, seed, worker, step):

    permanent      one worker is 2 times slower, for good
    transient      each worker is 4 times slower in a step, with a chance of 10 %
    rotating       one worker is 3 times slower; every PERIOD steps it is another one
    noise          each worker's time in a step is log-normal around the usual one, sigma 0.15
    speeds         the workers' speeds are 1, 1, 1, 1, 1.5, 1.5, 2.5, 2.5
    stall          each worker is 30 times slower in a step, with a chance of 1 %
    none           all are equally fast, always

Asynchronous rules have no common steps. For them a step of the pattern is the time that workers of full speed
need for a step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

SPEEDS = (1.0, 1.0, 1.0, 1.0, 1.5, 1.5, 2.5, 2.5)
SIGMA = 0.15
PATTERNS = ("permanent", "transient", "rotating", "noise", "speeds", "stall")


@dataclass(frozen=True)
class Pattern:
    """Which worker is slow, when, and by how much.

    Attributes:
        name: name of a pattern above.
        workers: number of workers.
        seed: seed of all random numbers.
        period: number of steps after which another worker is slow, for ``rotating``.
    """

    name: str
    workers: int
    seed: int = 0
    period: int = 200

    def slowdown(self, worker: int, step: int) -> float:
        """How many times the usual time a worker needs in a step.

        >>> [Pattern("speeds", 8).slowdown(worker, 0) for worker in (0, 4, 7)]
        [1.0, 0.6666666666666666, 0.4]
        """
        return _SLOWDOWNS[self.name](self, worker, step)

    def speed(self, step: int) -> float:
        """The sum of the workers' speeds in a step, in microbatches per base time."""
        return sum(1 / self.slowdown(worker, step) for worker in range(self.workers))

    def ideal_seconds(self, step: int, microbatches: int, base: float) -> float:
        """How long a step takes at the sum of the speeds."""
        return microbatches * base / self.speed(step)

    def possible(self, begin: float, end: float, slot: float, base: float) -> float:
        """How many microbatches all workers can compute between two times, if a step of the pattern lasts ``slot``.

        >>> Pattern("permanent", 2).possible(0.0, 3.0, 1.0, 0.5)
        9.0
        """
        total, now = 0.0, begin
        while now < end:
            step = math.floor(now / slot)
            until = min(end, (step + 1) * slot)
            if until <= now:  # the step's end, rounded
                step, until = step + 1, min(end, (step + 2) * slot)
            total += (until - now) * self.speed(step) / base
            now = until
        return total

    def drawn(self, *key: object) -> random.Random:
        """A generator that depends on the pattern and the key alone."""
        return random.Random(":".join(map(str, (self.name, self.seed, *key))))


def _permanent(pattern: Pattern, worker: int, step: int) -> float:
    return 2.0 if worker == pattern.drawn().randrange(pattern.workers) else 1.0


def _transient(pattern: Pattern, worker: int, step: int) -> float:
    return 4.0 if pattern.drawn(worker, step).random() < 0.1 else 1.0


def _stall(pattern: Pattern, worker: int, step: int) -> float:
    return 30.0 if pattern.drawn(worker, step).random() < 0.01 else 1.0


def _rotating(pattern: Pattern, worker: int, step: int) -> float:
    first = pattern.drawn().randrange(pattern.workers)
    return 3.0 if worker == (first + 3 * (step // pattern.period)) % pattern.workers else 1.0


def _noise(pattern: Pattern, worker: int, step: int) -> float:
    return pattern.drawn(worker, step).lognormvariate(0.0, SIGMA)


def _speeds(pattern: Pattern, worker: int, step: int) -> float:
    return 1 / SPEEDS[worker * len(SPEEDS) // pattern.workers]


_SLOWDOWNS: dict[str, Callable[[Pattern, int, int], float]] = {
    "permanent": _permanent,
    "transient": _transient,
    "rotating": _rotating,
    "noise": _noise,
    "speeds": _speeds,
    "stall": _stall,
    "none": lambda pattern, worker, step: 1.0,
}
