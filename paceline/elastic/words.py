"""The plain data of membership."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """How many workers there must be, may be, and are wanted now.

    Attributes:
        least: below this number training waits.
        most: more are not taken.
        wanted: lost workers are replaced up to this number.
        replaces: whether workers that were lost are started anew.
        patience: seconds to wait for replacements below the least number.
        drops: whether those that are late are dropped.
    """

    least: int
    most: int
    wanted: int
    replaces: bool = False
    patience: float = 600.0
    drops: bool = False


@dataclass(frozen=True)
class Lost:
    """Who was lost, and how.

    Attributes:
        worker: the number of the process.
        rank: what it was in the view; none if it was not in it.
        what: in words: who, and what happened.
        runs: whether its process may still run.
    """

    worker: int
    rank: int | None
    what: str
    runs: bool = False
