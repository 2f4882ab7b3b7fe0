"""Plans of faults to inject: the kind of fault, the rank, the step and the point in the step. Plain data, no torch.

::

    plan = faults.kill(rank=1, step=7, point="inside the collective") + faults.slow(rank=0, seconds=0.05)
    run("train.py", 3, tmp_path, environment=plan.environment())

The environment variable ``PACELINE_FAULTS`` carries the plan. If the variable is set, ``paceline.start`` arms the fault
points of a step (``paceline.system.fault_points``). Otherwise they do nothing.

A fault applies to the worker that holds its rank when its step is first reached, and happens once in a run. A file in
the plan's directory marks it as done, so neither the replacement of a killed worker nor a repeated step triggers the
fault again.
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
    """Fault of one worker. The functions below create faults.

    Attributes:
        kind: kind of fault.
        rank: rank of the worker when it first reaches the step.
        step: step of the fault. In a save and in evaluate it is the number of completed steps. During recovery and
            while the state is sent it is the minimum number of completed steps.
        point: fault point in the step.
        seconds: seconds that a stop or a full disk lasts (without it, until the end), or that a slow worker waits.
        factor: factor by which everything in a slow worker takes longer.
        until: first step at which a slow worker runs at full speed again.
        code: exit code.
        text: message of the error.
        under: folder in which writes fail.
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
        """Return whether a fault is due at a step. Slow workers and recovery faults stay due at later steps."""
        if self.kind != "slow" and self.point not in ("during recovery", "sending the state"):
            return step == self.step
        return step >= self.step and (self.until is None or step < self.until)


@dataclass(frozen=True)
class Plan:
    """Set of faults. Combine plans with ``+``."""

    faults: tuple[Fault, ...] = ()
    directory: Path | None = None

    def __add__(self, other: Plan) -> Plan:
        return Plan(self.faults + other.faults, self.directory or other.directory)

    def environment(self, directory: str | Path | None = None) -> dict[str, str]:
        """Return the environment variable that carries the plan to the workers of one run.

        Args:
            directory: directory for the marks of faults that happened. The first fault creates it. All workers must see
                it, and each run needs its own. Defaults to a new path in the folder for temporary files.
        """
        marks = directory or self.directory or Path(tempfile.gettempdir()) / f"paceline-faults-{uuid.uuid4().hex[:12]}"
        faults = [{key: value for key, value in asdict(fault).items() if value is not None} for fault in self.faults]
        return {env.FAULTS: json.dumps({"directory": str(marks), "faults": faults})}


def read(text: str) -> Plan:
    """Return the plan that the text of ``PACELINE_FAULTS`` describes. Raises ConfigError if the text is not a plan."""
    try:
        plan = json.loads(text)
        directory = plan.get("directory")
        return Plan(tuple(Fault(**fault) for fault in plan["faults"]), Path(directory) if directory else None)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"{env.FAULTS} holds no plan of faults: {error}") from None


def kill(*, rank: int, step: int, point: Point = "before forward") -> Plan:
    """Kill the process (SIGKILL), as if the machine ran out of memory or lost power."""
    return _one("kill", rank, step, point)


def stop(*, rank: int, step: int, point: Point = "before forward", seconds: float | None = None) -> Plan:
    """Stop the process (SIGSTOP), so that it is silent but not gone. It continues after ``seconds``, or never."""
    return _one("stop", rank, step, point, seconds=seconds)


def exit(*, rank: int, step: int, point: Point = "before forward", code: int = 1) -> Plan:
    """End the process immediately with an exit code (``os._exit``), without cleaning up."""
    return _one("exit", rank, step, point, code=code)


def error(*, rank: int, step: int, point: Point = "before forward", text: str = "a fault of the test") -> Plan:
    """Raise a ``RuntimeError`` with ``text`` in the worker."""
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
    """Slow the worker down from a step on. With ``seconds`` it waits at the point of each step. With ``factor``
    everything takes ``factor`` times as long: a helper stops and continues the process up to 50 times a second.

    Raises:
        ConfigError: both or neither of ``seconds`` and ``factor`` are given, or the factor is below 1.
    """
    if (seconds is None) == (factor is None) or (factor is not None and factor < 1):
        raise ConfigError(f"A slow worker needs seconds or a factor from 1, not seconds={seconds}, factor={factor}.")
    return _one("slow", rank, step, point, until=until, seconds=seconds, factor=factor)


def drop_network(*, rank: int, step: int, point: Point = "before forward") -> Plan:
    """Shut down all TCP connections of the process, in both directions.

    The peers see a closed connection, not silence. New connections are possible. Workers that exchange gradients
    through shared memory hardly use the network.
    """
    return _one("drop network", rank, step, point)


def fill_disk(
    *, rank: int, step: int, under: str | Path, point: Point = "before forward", seconds: float | None = None
) -> Plan:
    """Refuse to write files and create folders under a folder (ENOSPC), for ``seconds`` or until the process ends.

    Reads and deletions still work, and so do writes to a file that is already open.
    """
    return _one("fill disk", rank, step, point, under=str(Path(under).absolute()), seconds=seconds)


def _one(kind: Kind, rank: int, step: int, point: Point, **more: Any) -> Plan:
    return Plan((Fault(kind, rank, step, point, **more),))


def happened(directory: Path) -> dict[int, Mapping[str, Any]]:
    """Return the ``time``, ``pid``, ``rank`` and ``step`` of the faults that happened, by index in the plan.

    Args:
        directory: directory given to :meth:`Plan.environment`.
    """
    return {int(path.stem): json.loads(path.read_text() or "{}") for path in sorted(directory.glob("[0-9]*.json"))}
