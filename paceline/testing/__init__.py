"""Tools for tests, shipped: a test on many processes, faults to order, and a comparison of what runs recorded.

::

    from paceline.testing import faults, processes

    @processes(3, faults=faults.kill(rank=1, step=7), ends={1: "SIGKILL"})
    def test_the_others_notice(worker): ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.testing import faults
    from paceline.testing.decorator import Worker, processes
    from paceline.testing.fault_points import reach
    from paceline.testing.ranks import Ended, Kill, run

_HOMES = {
    "Ended": "ranks",
    "Kill": "ranks",
    "Worker": "decorator",
    "faults": "faults",
    "processes": "decorator",
    "reach": "fault_points",
    "run": "ranks",
}

__all__ = ["Ended", "Kill", "Worker", "faults", "processes", "reach", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline.testing' has no attribute {name!r}")
    home = import_module(f"paceline.testing.{_HOMES[name]}")
    return home if name == _HOMES[name] else getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
