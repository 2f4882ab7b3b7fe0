"""Tools for tests: test functions and scripts on several processes or threads, and fault injection.

::

    from paceline.testing import faults, processes

    @processes(3, faults=faults.kill(rank=1, step=7), ends={1: "SIGKILL"})
    def test_the_others_notice(worker): ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.system.fault_points import reach
    from paceline.testing import faults, threads
    from paceline.testing.decorator import Worker, processes
    from paceline.testing.ranks import Ended, Kill, run

_HOMES = {
    "Ended": "paceline.testing.ranks",
    "Kill": "paceline.testing.ranks",
    "Worker": "paceline.testing.decorator",
    "processes": "paceline.testing.decorator",
    "reach": "paceline.system.fault_points",
    "run": "paceline.testing.ranks",
}

__all__ = ["Ended", "Kill", "Worker", "faults", "processes", "reach", "run", "threads"]


def __getattr__(name: str) -> Any:
    if name in ("faults", "threads"):
        return import_module(f"paceline.testing.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline.testing' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
