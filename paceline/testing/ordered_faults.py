"""Faults ordered for this process. ``paceline.system.fault_points`` loads this module if a test has ordered any."""

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
    """Return the faults that the text of the variable orders.

    Raises:
        ConfigError: it holds no plan, or it is not known where to mark what has happened.
    """
    plan, run = read(text), env.run_directory()
    directory = plan.directory or (run / "faults" if run else None)
    if directory is None:
        raise ConfigError(f"{env.FAULTS} names no directory in which to mark what has happened.")
    return OrderedFaults(plan, directory, rank)


class OrderedFaults:
    """The faults of a plan, as one process meets them.

    Args:
        plan: what is to happen.
        directory: where to mark what has happened.
        rank: gives the current rank of this process.
    """

    def __init__(self, plan: Plan, directory: Path, rank: Callable[[], int]) -> None:
        self._faults = plan.faults
        self._directory = directory
        self._rank = rank
        self._own: set[int] = set()
        self._slowing: dict[int, Any] = {}

    def reach(self, point: Point, step: int) -> None:
        """Let the faults happen that are due at this point of this step."""
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
        """Tell whether this process has the fault; a slow worker keeps it when it gets another rank."""
        if index in self._own:
            return fault.kind == "slow"
        if fault.rank != self._rank() or not self._claim(index, step):
            return False
        self._own.add(index)
        return True

    def _claim(self, index: int, step: int) -> bool:
        """Mark a fault as done; true for the one process of the run that succeeds."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            with (self._directory / f"{index}.json").open("x") as file:
                json.dump({"time": time.time(), "pid": os.getpid(), "rank": self._rank(), "step": step}, file)
        except FileExistsError:
            return False
        return True
