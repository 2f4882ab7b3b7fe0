"""Plan of the faults of a simulated run, drawn from its seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from simulator.worker import STEPS

KINDS = {"kill": 6, "stop": 3, "cut": 2, "leave": 2, "join": 2, "fail": 1, "lose machine": 2, "cut machine": 1}
"""Kinds of faults and their relative frequencies. ``stop`` and ``cut`` (the network) last some seconds. ``leave``
requests the worker to end. ``join`` adds a slot for one more worker. In ``fail`` the script raises an error.
"""


@dataclass(frozen=True)
class Fault:
    """Fault of a simulated run, and its time."""

    kind: str  # one of :data:`KINDS`
    # unit of ``at``: ``time`` (virtual seconds), ``point`` (number of fault points reached by workers), ``next``
    # (seconds after the previous fault), ``end`` (seconds after a worker first exits with code 0)
    when: str
    at: float  # time of the fault, in the unit of ``when``
    # number that selects a running worker or a machine. A fault at a point hits the worker that reached it.
    victim: int
    seconds: float  # duration of the fault


@dataclass(frozen=True)
class Plan:
    """Plan of a simulated run."""

    seed: int  # seed of all other random numbers
    workers: tuple[int, ...]  # initial number of workers on each machine
    least: int  # minimum number of workers that can train
    sharded: bool  # whether each worker holds only a part of the state
    faults: tuple[Fault, ...]  # faults to inject

    @property
    def parts(self) -> int:
        """Number of parts of the model: three as in a pipeline, four as in sharded training, six with copies."""
        if not self.sharded:
            return 1
        return 6 if self.seed % 5 == 1 else 3 + self.seed % 2

    @property
    def grows(self) -> bool:
        """Whether the script adds samples to its data set."""
        return self.seed % 8 in (2, 7)  # a quarter, without the histories that were broken before data could grow

    @classmethod
    def of(cls, seed: int) -> Plan:
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
