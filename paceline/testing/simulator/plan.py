"""What goes wrong in a simulated run, and when: drawn from its seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from paceline.testing.simulator.worker import STEPS

KINDS = {"kill": 6, "stop": 3, "cut": 2, "leave": 2, "join": 2, "fail": 1, "lose machine": 2, "cut machine": 1}
"""What goes wrong, and how often. ``stop`` and ``cut`` (the network) last for some seconds; ``leave``: the worker is
told to end; ``join``: there is room for one more; ``fail``: the script raises an error.
"""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and when.

    Attributes:
        kind: one of :data:`KINDS`.
        when: ``time`` (virtual seconds), ``point`` (the workers have come to fault points so many times), ``next`` (so
            many seconds after the fault before it), ``end`` (so many seconds after the first worker has ended well).
        at: how many.
        victim: chooses among the workers that run, or the machines; of a fault at a point it is the one that is there.
        seconds: how long it lasts.
    """

    kind: str
    when: str
    at: float
    victim: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What a seed means.

    Attributes:
        seed: of everything else that is drawn.
        workers: how many begin on each machine.
        least: fewer cannot train.
        sharded: whether each worker holds a part of the state only.
        faults: what goes wrong.
    """

    seed: int
    workers: tuple[int, ...]
    least: int
    sharded: bool
    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Return the plan of a seed."""
        random = Random(seed)
        workers = random.choice([(1,), (2,), (3,), (4,), (2,), (3,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1)])
        count = sum(workers)
        kinds = random.choices(list(KINDS), list(KINDS.values()), k=random.randint(0, 5))
        most: dict[str, float] = {"time": 12.0, "point": 6 * count * STEPS, "next": 0.6, "end": 0.3}
        whens = random.choices(list(most), [3, 5, 4, 1], k=len(kinds))
        faults = tuple(
            Fault(
                kind,
                when,
                random.randint(1, int(most["point"])) if when == "point" else random.uniform(0.0, most[when]),
                random.randint(0, 7),
                random.choice([0.2, 2.0, 20.0, 100.0]),
            )
            for kind, when in zip(kinds, whens, strict=True)
        )
        least = random.choice([1, 1, max(1, count - 1), count])
        return cls(seed, workers, least, random.random() < 0.5, faults)
