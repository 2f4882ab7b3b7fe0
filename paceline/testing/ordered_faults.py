"""Fault injection in this process. ``paceline.system.fault_points`` loads this module if a test requests faults."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.environments import env
from paceline.errors import ConfigError
from paceline.system.fault_points import Point
from paceline.testing.fault_actions import slow_down, speed_up, strike
from paceline.testing.faults import Fault, Plan, read


def from_environment(text: str, rank: Callable[[], int]) -> OrderedFaults:
    """Return the faults of the plan in ``PACELINE_FAULTS``."""
    plan, run = read(text), env.run_directory()
    directory = plan.directory or (run / "faults" if run else None)
    if directory is None:
        raise ConfigError(f"{env.FAULTS} names no directory in which to mark what has happened.")
    return OrderedFaults(plan, directory, rank)


class OrderedFaults:
    """Faults of a plan that this process injects.

    Args:
        directory: directory in which files mark the faults that have happened.
        rank: function that returns the current rank of this process.
    """

    def __init__(self, plan: Plan, directory: Path, rank: Callable[[], int]) -> None:
        self._faults = plan.faults
        self._directory = directory
        self._rank = rank
        self._own: set[int] = set()
        self._slowing: dict[int, Any] = {}

    def reach(self, point: Point, step: int) -> None:
        """Inject the faults that are due at this point of this step."""
        for index, fault in enumerate(self._faults):
            if fault.point != point:
                continue
            if index in self._slowing and not fault.covers(step):
                speed_up(self._slowing.pop(index))
            if not fault.covers(step) or not self._has(index, fault, step):
                continue
            if fault.kind != "slow":
                strike(fault)
            elif fault.seconds is not None:
                time.sleep(fault.seconds)
            elif fault.factor is not None and index not in self._slowing:
                self._slowing[index] = slow_down(fault.factor)

    def _has(self, index: int, fault: Fault, step: int) -> bool:
        """Return whether to inject the fault in this process. A slow worker stays slow after its rank changes."""
        if index in self._own:
            return fault.kind == "slow"
        if fault.rank != self._rank() or not self._claim(index, step):
            return False
        self._own.add(index)
        return True

    def _claim(self, index: int, step: int) -> bool:
        """Mark a fault as done. Return True in only one process of the run."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            with (self._directory / f"{index}.json").open("x") as file:
                json.dump({"time": time.time(), "pid": os.getpid(), "rank": self._rank(), "step": step}, file)
        except FileExistsError:
            return False
        return True
