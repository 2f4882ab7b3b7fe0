"""The points of a step at which faults happen, and how they are set there: by wrapping functions of this process.

::

    step t     before forward        a strategy's step begins
               in the loader         samples of step t are about to be read, by whoever reads them
               inside the collective all gradients have left; the last bucket's mean is not given out yet
               between reduction and update
               after update          the model is that of step t + 1, nobody has been told
    t done     in evaluate           this worker has measured its share; no one else knows
               inside a save         the tensors are written, the manifest is not
               during recovery       the workers begin to gather anew; the code there calls reach itself

Only the functions that a plan needs are wrapped, and only where a plan is given.
"""

from __future__ import annotations

import functools
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline import env
from paceline.data.feed import Request
from paceline.errors import ConfigError
from paceline.testing.fault_actions import slow_down, speed_up, strike
from paceline.testing.faults import Fault, Plan, Point, read


class Faults:
    """The faults of a plan, as one process meets them.

    Args:
        plan: what is to happen.
        directory: where it is marked what has.
        rank: tells the rank that this process has now.
    """

    def __init__(self, plan: Plan, directory: Path, rank: Callable[[], int]) -> None:
        self._faults = plan.faults
        self._directory = directory
        self._rank = rank
        self._own: set[int] = set()
        self._slowing: dict[int, Any] = {}

    def reach(self, point: Point, step: int) -> None:
        """Let the faults happen that are due here."""
        for place, fault in enumerate(self._faults):
            if fault.point != point:
                continue
            if place in self._slowing and not fault.covers(step):
                speed_up(self._slowing.pop(place))
            if not fault.covers(step) or not self._has(place, fault, step):
                continue
            if fault.kind != "slow":
                strike(fault)
            elif fault.seconds is not None:
                time.sleep(fault.seconds)
            elif fault.factor is not None and place not in self._slowing:
                self._slowing[place] = slow_down(fault.factor)

    def _has(self, place: int, fault: Fault, step: int) -> bool:
        """Whether this process has the fault; a slow worker keeps it, also when it gets another rank."""
        if place in self._own:
            return fault.kind == "slow"
        if fault.rank != self._rank() or not self._claim(place, step):
            return False
        self._own.add(place)
        return True

    def _claim(self, place: int, step: int) -> bool:
        """Mark a fault as done; true for the one process in the run that does."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            with (self._directory / f"{place}.json").open("x") as file:
                json.dump({"time": time.time(), "pid": os.getpid(), "rank": self._rank(), "step": step}, file)
        except FileExistsError:
            return False
        return True


_faults: Faults | None = None
_world: Callable[[], Any] = lambda: None  # noqa: E731 - replaced by a weak reference to the newest world
_now: dict[str, int] = {}
"""The step that is being done, saved or measured after; asked for from other threads, too."""


def reach(point: Point, step: int) -> None:
    """Say that this process is at a point of a step now; the faults that are due happen. Without a plan: nothing.

    Raises:
        RuntimeError: such an error is due.
    """
    if _faults is not None:
        _faults.reach(point, step)


def install() -> None:
    """Set the faults that the environment asks for, once in a process; without any, do nothing.

    Raises:
        ConfigError: the variable holds no plan, or it is not known where to mark what has happened.
        AssertionError: a function that is to be wrapped is not there (any more).
    """
    global _faults
    text = env.faults()
    if text is None or _faults is not None:
        return
    plan, run = read(text), env.run_directory()
    directory = plan.directory or (run / "faults" if run else None)
    if directory is None:
        raise ConfigError(f"{env.FAULTS} names no directory in which to mark what has happened.")
    _faults = Faults(plan, directory, _rank)
    before("paceline.comm.world:World.__init__", _remember_world)
    for point in sorted({fault.point for fault in plan.faults}):
        SETTERS[point]()


def _remember_world(world: Any, *_: object, **__: object) -> None:
    global _world
    _world = weakref.ref(world)


def _rank() -> int:
    """The rank that this process has now; -1 if it waits to join and has none yet."""
    world = _world()
    if getattr(world, "line", None) is not None and not world._members:
        return -1
    return int(getattr(world, "rank", env.identity().rank))


# How to wrap. A function is named "module:name" or "module:Class.name", and must be there.


def before(name: str, act: Callable[..., None]) -> None:
    """Let ``act`` see the arguments of each call of a function, before it."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            act(*arguments, **named)
            return original(*arguments, **named)

        return wrapped

    replace(name, make)


def after(name: str, act: Callable[..., None]) -> None:
    """Let ``act`` see the arguments of each call of a function, after it has ended well."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            value = original(*arguments, **named)
            act(*arguments, **named)
            return value

        return wrapped

    replace(name, make)


def replace(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put what ``make`` makes of a function in its place."""
    owner, last = find(name)
    original = getattr(owner, last)
    setattr(owner, last, functools.wraps(original)(make(original)))


def find(name: str) -> tuple[Any, str]:
    """What holds a function, and under which name.

    Raises:
        AssertionError: there is no such function.
    """
    module, _, path = name.partition(":")
    *parents, last = path.split(".")
    owner: Any = import_module(module)
    for parent in parents:
        owner = getattr(owner, parent, None)
    if not callable(getattr(owner, last, None)):
        raise AssertionError(f"No fault can be set at {name}: there is no such function. Name the new one there.")
    return owner, last


# Where each point is.


def _each_strategy(set_: Callable[[str, Callable[..., None]], None], act: Callable[..., None]) -> None:
    """Wrap the step of each strategy, once where one inherits it from another."""
    done: set[Any] = set()
    for kind in import_module("paceline.strategies.registry").STRATEGIES.values():
        home = next(parent for parent in kind.__mro__ if "step" in vars(parent))
        if home not in done:
            done.add(home)
            set_(f"{home.__module__}:{home.__qualname__}.step", act)


def _set_before_forward() -> None:
    _each_strategy(before, lambda _, step, *__, **___: reach("before forward", step))


class Dated(Request):
    """A request that knows its step, also in a process that only loads."""

    step: int


def _set_in_the_loader() -> None:
    def make(original: Callable[..., Iterator[Request]]) -> Callable[..., Iterator[Request]]:
        def dated(feed: Any, start: int, stop: int, pieces_of: Callable[[int], list[range]]) -> Iterator[Request]:
            for step in range(start, stop):
                for request in original(feed, step, step + 1, pieces_of):
                    known = Dated(*request)
                    known.step = step
                    yield known

        return dated

    def read_samples(_: Any, request: Any) -> None:
        if isinstance(request, Dated):
            reach("in the loader", request.step)

    replace("paceline.data.feed:Feed._requests_of", make)
    before("paceline.data.feed:KeyedDataset.__getitems__", read_samples)


def _set_inside_the_collective() -> None:
    def start(_: Any, step: int, *__: object, **___: object) -> None:
        _now["step"] = step

    def reduce(exchange: Any, bucket: Any) -> None:
        if exchange._name == "gradients" and bucket is exchange._buckets[-1]:
            reach("inside the collective", _now["step"])

    _each_strategy(before, start)
    before("paceline.comm.reduction.bucketed:BucketedReduction._reduce", reduce)


def _set_between_reduction_and_update() -> None:
    before(
        "paceline.step.optimizer:Update.apply",
        lambda _, step, *__, **___: reach("between reduction and update", step),
    )


def _set_after_update() -> None:
    after("paceline.step.optimizer:Update.apply", lambda _, step, *__, **___: reach("after update", step))


def _set_inside_a_save() -> None:
    def start(_: Any, saved: Any, *__: object, **___: object) -> None:
        _now["saved"] = saved.step

    before("paceline.checkpoint.save:save", start)
    after("paceline.checkpoint.files:write", lambda *_, **__: reach("inside a save", _now["saved"]))


def _set_in_evaluate() -> None:
    def start(_: Any, event: str, **fields: Any) -> None:
        if event == "evaluate":
            _now["evaluated"] = fields["step"]

    def gather(_: Any, value: object, what: str) -> None:
        if what == "evaluate":
            reach("in evaluate", _now["evaluated"])

    before("paceline.events:EventLog.span", start)
    before("paceline.comm.world:World.gather", gather)


def _set_during_recovery() -> None:
    """Recovery itself says when it is there: it calls :func:`reach`."""


SETTERS: dict[Point, Callable[[], None]] = {
    "before forward": _set_before_forward,
    "in the loader": _set_in_the_loader,
    "inside the collective": _set_inside_the_collective,
    "between reduction and update": _set_between_reduction_and_update,
    "after update": _set_after_update,
    "inside a save": _set_inside_a_save,
    "in evaluate": _set_in_evaluate,
    "during recovery": _set_during_recovery,
}
