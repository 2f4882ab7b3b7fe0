"""Faults to order: what goes wrong, on which worker, at which step, at which point of it. Plain data, no torch.

::

    plan = faults.kill(rank=1, step=7, point="inside the collective") + faults.slow(rank=0, seconds=0.05)
    run("train.py", 3, tmp_path, environment=plan.environment())

The plan travels in one environment variable, ``PACELINE_FAULTS``. Where it is set, ``paceline.start`` arms the points
of a step (``paceline.system.fault_points``); where it is not, they do nothing.

A fault belongs to the worker that holds its rank when its step is first reached, and happens once in a run: it is
marked as done by a file in the plan's directory. So neither a worker that replaces a killed one nor a repeated step
meets it again.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.environments import env
from paceline.errors import ConfigError
from paceline.system.fault_points import Point

Kind = Literal["kill", "stop", "exit", "error", "slow", "drop network", "fill disk"]
POINTS: tuple[Point, ...] = get_args(Point)
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Fault:
    """One fault; made by the functions below.

    Attributes:
        kind: what happens.
        rank: of the worker, when it first reaches the step.
        step: when; in a save and in evaluate the number of steps done, during recovery and while sending the state
            the least number of steps done.
        point: where in the step.
        seconds: how long a stop or a full disk lasts (none: until the end), or how long a slow worker waits.
        factor: how many times as long a slow worker takes for everything.
        until: the first step at which a slow worker is fast again.
        code: the exit code.
        text: of the error.
        under: the folder that is full.
    """

    kind: Kind
    rank: int
    step: int
    point: Point
    seconds: float | None = None
    factor: float | None = None
    until: int | None = None
    code: int | None = None
    text: str | None = None
    under: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"There is no fault {self.kind!r}; the kinds are {', '.join(KINDS)}.")
        if self.point not in POINTS:
            raise ConfigError(f"There is no point {self.point!r} in a step; the points are {', '.join(POINTS)}.")
        if self.rank < 0 or self.step < 0:
            raise ConfigError(f"A fault needs a rank and a step from 0, not rank {self.rank} and step {self.step}.")

    def covers(self, step: int) -> bool:
        """Tell whether the fault is due at a step: at its own; for slow workers and recoveries also later."""
        if self.kind != "slow" and self.point not in ("during recovery", "sending the state"):
            return step == self.step
        return step >= self.step and (self.until is None or step < self.until)


@dataclass(frozen=True)
class Plan:
    """Some faults. Plans add up with ``+``."""

    faults: tuple[Fault, ...] = ()
    directory: Path | None = None

    def __add__(self, other: Plan) -> Plan:
        return Plan(self.faults + other.faults, self.directory or other.directory)

    def environment(self, directory: str | Path | None = None) -> dict[str, str]:
        """Return the variable that brings the plan to the workers of one run.

        Args:
            directory: where to mark the faults that happened, made when the first one happens; all workers must see it,
                and each run needs its own. None: a new name in the folder for temporary files.
        """
        marks = directory or self.directory or Path(tempfile.gettempdir()) / f"paceline-faults-{uuid.uuid4().hex[:12]}"
        faults = [{key: value for key, value in asdict(fault).items() if value is not None} for fault in self.faults]
        return {env.FAULTS: json.dumps({"directory": str(marks), "faults": faults})}


def read(text: str) -> Plan:
    """Parse the text of the variable.

    Raises:
        ConfigError: it is no plan.
    """
    try:
        plan = json.loads(text)
        directory = plan.get("directory")
        return Plan(tuple(Fault(**fault) for fault in plan["faults"]), Path(directory) if directory else None)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"{env.FAULTS} holds no plan of faults: {error}") from None


def kill(*, rank: int, step: int, point: Point = "before forward") -> Plan:
    """Kill the process (SIGKILL), as when the machine runs out of memory or loses power."""
    return _one("kill", rank, step, point)


def stop(*, rank: int, step: int, point: Point = "before forward", seconds: float | None = None) -> Plan:
    """Stop the process (SIGSTOP): it is silent but not gone. It continues after some seconds, or never."""
    return _one("stop", rank, step, point, seconds=seconds)


def exit(*, rank: int, step: int, point: Point = "before forward", code: int = 1) -> Plan:
    """End the process at once with an exit code (``os._exit``), without cleaning up."""
    return _one("exit", rank, step, point, code=code)


def error(*, rank: int, step: int, point: Point = "before forward", text: str = "a fault of the test") -> Plan:
    """Raise a ``RuntimeError`` with this text."""
    return _one("error", rank, step, point, text=text)


def slow(
    *,
    rank: int,
    step: int = 0,
    until: int | None = None,
    point: Point = "before forward",
    seconds: float | None = None,
    factor: float | None = None,
) -> Plan:
    """Slow the worker down from a step on: it waits some seconds at the point of each step, or takes ``factor`` times
    as long for everything (it is stopped and continued in turn, up to 50 times a second).

    Raises:
        ConfigError: not exactly one of ``seconds`` and ``factor`` is given, or the factor is below 1.
    """
    if (seconds is None) == (factor is None) or (factor is not None and factor < 1):
        raise ConfigError(f"A slow worker needs seconds or a factor from 1, not seconds={seconds}, factor={factor}.")
    return _one("slow", rank, step, point, until=until, seconds=seconds, factor=factor)


def drop_network(*, rank: int, step: int, point: Point = "before forward") -> Plan:
    """Shut down every TCP connection of the process, in both directions.

    The peers see a closed connection, not silence. New connections can be made. Workers that exchange gradients through
    shared memory hardly use the network.
    """
    return _one("drop network", rank, step, point)


def fill_disk(
    *, rank: int, step: int, under: str | Path, point: Point = "before forward", seconds: float | None = None
) -> Plan:
    """Fail to write files and make folders under a folder (ENOSPC), from now on or for some seconds.

    Reading and removing work. A file that is open already can still be written.
    """
    return _one("fill disk", rank, step, point, under=str(Path(under).absolute()), seconds=seconds)


def _one(kind: Kind, rank: int, step: int, point: Point, **more: Any) -> Plan:
    return Plan((Fault(kind, rank, step, point, **more),))


def happened(directory: Path) -> dict[int, Mapping[str, Any]]:
    """Return the faults that happened in a run: by position in the plan, its ``time``, ``pid``, ``rank`` and ``step``.

    Args:
        directory: the one given to :meth:`Plan.environment`.
    """
    return {int(path.stem): json.loads(path.read_text() or "{}") for path in sorted(directory.glob("[0-9]*.json"))}
