"""Trials of a script on this machine: the costs of its layers, and the duration and memory of a few steps."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from paceline.environments import env
from paceline.errors import InputError
from paceline.launchers.base import Request
from paceline.observe import records
from paceline.planning.costs import Profile, Work, read
from paceline.planning.search import Candidate, Layout, Measured, candidates
from paceline.planning.simulate import Machine

STEPS, WARM = 20, 4
_WHOLE = {"strategy": "allreduce", "compile": "false"}
REACHED, SHARED = 0.95, 0.9
"""Fraction of a link's bandwidth that gloo reaches over TCP with large messages, and the part of it that is left where
workers exchange data with more than one peer on other machines. ``bench/plan/links.py`` measures both.
"""

Start = Callable[[Request], object]
"""Runs a request to its end, and raises if it fails."""


class Trial(NamedTuple):
    """Duration and memory of some steps of a script."""

    seconds: list[float]  # duration of each step
    fused: bool  # whether microbatches were fused
    memory_bytes: int | None  # peak memory of the largest worker process. None if unknown.
    first_bytes: int = 0  # the same after the first step


def measure(
    base: Request,
    counts: Sequence[int],
    cores: int,
    start: Start,
    check: Callable[[Profile], object] = lambda profile: None,
) -> dict[int, Measured]:
    """Measure a script with each number of workers on this machine.

    Args:
        base: request with the script and its settings.
        counts: numbers of workers; the first is 1.
        cores: cores of this machine.
        start: see :data:`Start`.
        check: called with each profile before more is measured.

    Raises:
        InputError: the script does not call ``paceline.start``, or takes too few steps.
    """
    found: dict[int, Measured] = {}
    for workers in counts:
        profile = _profile(base, workers, start)
        check(profile)
        found[workers] = _fitted(profile, steps_of(base, workers, {"strategy": "allreduce"}, start), workers, cores)
    return found


def layout_of(
    cores: int, most: int, link: Sequence[float], latency: float, memory: float | None, speeds: Sequence[float] = ()
) -> Layout:
    """Return the machines: this one for all workers, or one for each worker.

    Args:
        cores: cores of this machine.
        most: largest number of workers.
        link: bandwidth of each machine's link in Mbit/s, or one for all. Empty if all workers are on this machine.
        latency: milliseconds that a message takes on that link.
        memory: memory of a worker in GB. None if it is unlimited.
        speeds: speed of each machine relative to this one, or one for all. Defaults to equal machines.
    """
    limit = math.inf if memory is None else memory * 1e9
    if not link:
        return Layout(Machine(cores=cores), most, limit)
    count = max(len(link), len(speeds))
    rates, speeds = (many if len(many) > 1 else [*many] * count for many in (link, speeds or (1.0,)))
    first, *others = (
        Machine(cores, rate * 1e6 / 8 * REACHED, latency / 1000, speed, SHARED)
        for rate, speed in zip(rates, speeds, strict=True)
    )
    return Layout(first, 1, limit, "a machine each", tuple(others))


def steps_of(base: Request, workers: int, settings: Mapping[str, str], start: Start, steps: int = STEPS) -> Trial:
    """Run some steps of a script, and measure them. Raises InputError if the script takes too few steps."""
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as directory:
        request = replace(
            base,
            workers=workers,
            settings={**base.settings, **settings},
            runs=Path(directory),
            name="run",
            environment={env.TRIED_STEPS: str(steps)},
        )
        start(request)
        found = list(records.read(Path(directory) / "run", ("step", "note", "memory")))
    ends = sorted(one["time"] for one in found if one["event"] == "step" and one["rank"] == 0)
    fused = any(one["event"] == "note" and one.get("fused") for one in found)
    if len(ends) < WARM + 2:
        raise InputError(
            f"{base.script} took {len(ends)} steps, and a plan measures at least {WARM + 2}: let it train longer."
        )
    seconds = [later - sooner for sooner, later in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]
    reached = [(one["after"], one["reached"]) for one in found if one["event"] == "memory" and "after" in one]
    first = max((size for step, size in reached if step == 0), default=0)
    return Trial(seconds, fused, max((size for _, size in reached), default=None), first)


def _profile(base: Request, workers: int, start: Start) -> Profile:
    with tempfile.TemporaryDirectory(prefix="paceline-profile-") as directory:
        answer = Path(directory) / "profile.json"
        settings = {**base.settings, **_WHOLE}
        environment = {env.PROFILE: str(answer)}
        runs = Path(directory)
        start(replace(base, workers=workers, settings=settings, runs=runs, name="run", environment=environment))
        if not answer.exists():
            raise InputError(f"{base.script} ended without calling paceline.start.")
        return read(answer)


def _fitted(profile: Profile, trial: Trial, workers: int, cores: int) -> Measured:
    """Return costs with which the simulation has the time and memory of the measured steps.

    Time that the simulation does not explain becomes the overhead of a step. If the simulated step is the longer one,
    all measured costs are scaled down.
    """
    took = median(trial.seconds)
    quarters = quantiles(trial.seconds, n=4)
    spread = max(0.05, (quarters[2] - quarters[0]) / 2 / took)
    given = {"update": profile.update_seconds, "add": profile.add_seconds}
    given |= {"pass_seconds": profile.pass_seconds, "half_pass_seconds": profile.half_pass_seconds}
    if profile.message_seconds is not None:
        given["message_seconds"] = profile.message_seconds
    work = Work(profile.passes, profile.microbatches, trial.fused, core_load=profile.core_load, **given)
    first = _predicted(Measured(work, profile, 0.0), workers, cores)
    predicted, memory = first.step_seconds, dict[str, int]()
    if profile.process_bytes and trial.memory_bytes:
        sizes = trial.first_bytes, trial.memory_bytes - first.tensor_bytes
        memory = {
            name: max(0, size - profile.process_bytes)
            for name, size in zip(("first_bytes", "kept_bytes"), sizes, strict=True)
        }
    if predicted <= took:
        return Measured(replace(work, overhead=took - predicted), profile, spread, **memory)
    part = took / predicted
    passes = {
        count: tuple(replace(one, forward=part * one.forward, backward=part * one.backward) for one in layers)
        for count, layers in work.passes.items()
    }
    scaled: dict[str, Any] = {name: part * value for name, value in given.items()}
    return Measured(replace(work, passes=passes, **scaled), profile, spread, **memory)


def _predicted(measured: Measured, workers: int, cores: int) -> Candidate:
    """Return the simulated all-reduce on this machine."""
    layout = Layout(Machine(cores), workers)
    found = candidates({workers: measured}, layout, [workers], exact=measured.profile.exact, convergent=False)
    return next(found)


def settings_text(one: Candidate) -> dict[str, str]:
    """Return the settings of a candidate as ``--set`` takes them."""
    flat: dict[str, Any] = {"strategy": one.strategy}
    for key, value in one.settings.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": given for inner, given in value.items()}
        else:
            flat[key] = value
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat.items()}
