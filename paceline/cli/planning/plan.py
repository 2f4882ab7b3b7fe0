"""``paceline plan``: measure a script for some seconds, and predict how long training takes in other ways."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.display import table
from paceline.cli.options import Arguments, Plan, Script, Set
from paceline.cli.report import run_quietly
from paceline.errors import ConfigError, RunFailed
from paceline.launchers.base import Request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.planning.costs import Profile
    from paceline.planning.search import Candidate

_SAVED = "strategy", "workers", "settings", "step_seconds", "low", "high"
CONTEXT = {"allow_interspersed_args": True, "ignore_unknown_options": True}
MORE_HELP = """ The script trains for a few steps with 1 worker, 2 workers and more, up to the cores of this machine.

Options may also follow the script; what follows -- is passed to the script.
"""


def command(  # noqa: PLR0913 - each argument is an option
    script: Script,
    arguments: Arguments = None,
    workers: Annotated[
        int, typer.Option("--workers", "-n", help="Largest number of workers.", show_default="cores of this machine")
    ] = 0,
    link: Annotated[
        float | None, typer.Option(help="Each worker on a machine of its own, with a link of so many Mbit/s.")
    ] = None,
    latency: Annotated[float, typer.Option(help="Milliseconds that a message takes on that link.")] = 0.2,
    memory: Annotated[
        float | None, typer.Option(help="Memory of a worker, in GB; unlimited if none.", metavar="GB")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the whole training.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs of the whole training, instead.")] = None,
    tolerance: Annotated[
        str,
        typer.Option(help="bits: exact; rounding: what one process computes; convergent: also local training."),
    ] = "rounding",
    prove: Annotated[
        int, typer.Option(help="Run the best K plans and the worst on this machine, and compare.", metavar="K")
    ] = 0,
    save: Annotated[
        Path | None, typer.Option(help="Write the best plan, for paceline run --plan.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
    set_: Set = None,
    plan_: Plan = None,
) -> None:
    """Predict how long training takes with each strategy and number of workers."""
    from paceline import config
    from paceline.planning.search import best, explained, front

    _check(steps, epochs, prove, link, save, as_json)
    settings = config.parse_command_line(set_ or [])
    base = Request(script, tuple(arguments or ()), settings=settings, plan=plan_)
    profile, found = _candidates(base, workers, link, latency, memory, tolerance)
    ordered, pareto = best(found), front(found)
    total = steps if steps is not None else _steps(epochs, profile)
    if save is not None:
        first = _values(ordered[0], total, pareto=True)
        first["settings"] = {key: config.parse_value(value) for key, value in base.settings.items()} | first["settings"]
        save.write_text(json.dumps({key: first[key] for key in _SAVED}, indent=1) + "\n")
    rows = [_values(one, total, one in pareto) for one in sorted(found, key=lambda one: one.step_seconds)]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{profile.model}, batches of {profile.batch} in {profile.microbatches} microbatches")
    if profile.uncut:
        print(f"No pipelines, as the model cannot be cut: {profile.uncut}")
    print("\n" + "\n".join(table.lines(_rows(rows))))
    print("\n" + "\n".join(explained(found)))
    if save is not None:
        again = ["paceline", "run", "--plan", save, script, *(arguments or ())]
        where = ", with a machine for each worker (--hosts, or --on)" if link else ""
        print(f"Written to {save}: {shlex.join(map(str, again))}{where}")
    if prove:
        print("\n" + "\n".join(_prove(base, ordered, prove)))


def _check(
    steps: int | None, epochs: float | None, prove: int, link: float | None, save: Path | None, as_json: bool
) -> None:
    """Raise ConfigError for options that cannot be used."""
    if steps is not None and epochs is not None:
        raise ConfigError("--steps and --epochs both say how long training takes: give one of them.")
    for option, value in (("--epochs", epochs), ("--steps", steps)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{option} {value}: give a number above 0.")
    if prove < 0:
        raise ConfigError(f"--prove {prove}: give the number of plans to run.")
    if prove and link is not None:
        raise ConfigError("--prove runs plans on this machine, which has no such --link: leave out one of them.")
    if prove and as_json:
        raise ConfigError("--prove prints a table, not --json: leave out one of them.")
    if save is not None and (save.is_dir() or not save.absolute().parent.is_dir()):
        raise ConfigError(f"--save {save}: give a file in a folder that exists.")


def plan(
    script: str | Path,
    *arguments: str,
    workers: int | None = None,
    link: float | None = None,
    latency: float = 0.2,
    memory: float | None = None,
    tolerance: str = "rounding",
    settings: Mapping[str, Any] | None = None,
) -> list[Candidate]:
    """Predict how long a step takes with each strategy and number of workers, as ``paceline plan`` does.

    The script trains for a few steps with 1 worker, 2 workers and more, up to the cores of this machine.

    Args:
        script: script that trains.
        *arguments: arguments of the script.
        workers: largest number of workers. Defaults to the cores of this machine.
        link: bandwidth in Mbit/s, if each worker has a machine of its own. By default all are on this machine.
        latency: milliseconds that a message takes on that link.
        memory: memory of a worker in GB. Defaults to unlimited memory.
        tolerance: ``"rounding"`` for strategies that compute what one process computes, ``"bits"`` for these with
            ``exact``, ``"convergent"`` also for local training.
        settings: settings as for ``--set``.

    Returns:
        the candidates that fit, the fastest first.

    Raises:
        ConfigError: an argument cannot be used, or nothing fits into the memory.
        InputError: the script does not train, or takes too few steps.
        RunFailed: the script failed.
    """
    from paceline import config
    from paceline.planning.search import best

    given = config.parse_command_line([f"{key}={_on_line(value)}" for key, value in (settings or {}).items()])
    base = Request(Path(script), arguments, settings=given)
    try:
        return best(_candidates(base, workers or 0, link, latency, memory, tolerance)[1])
    except typer.Exit as error:
        raise RunFailed(f"{script} failed with exit code {error.exit_code}; its report is above.") from None


def _on_line(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _candidates(
    base: Request, workers: int, link: float | None, latency: float, memory: float | None, tolerance: str
) -> tuple[Profile, list[Candidate]]:
    """Measure a script, and simulate what is possible."""
    from paceline.launchers.prepare import check
    from paceline.planning.search import candidates
    from paceline.planning.trials import layout_of, measure

    cores = os.cpu_count() or 1
    most = workers or cores
    if most < 1:
        raise ConfigError(f"-n {most}: give the largest number of workers, at least 1.")
    for option, value in (("--link", link), ("--memory", memory)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{option} {value}: give a number above 0.")
    if not 0 <= latency < math.inf:
        raise ConfigError(f"--latency {latency}: give milliseconds, 0 or more.")
    if tolerance not in ("bits", "rounding", "convergent"):
        raise ConfigError(f"--tolerance {tolerance}: give bits, rounding or convergent.")
    if tolerance == "bits":
        base = replace(base, settings={**base.settings, "exact": "true"})
    check(base)
    measured = measure(base, _powers(min(most, 2 if link else cores)), cores, _start)
    profile = measured[1].profile
    layout = layout_of(cores, most, link, latency, memory)
    found = candidates(measured, layout, _powers(most), profile.exact, tolerance == "convergent")
    given = {"exact": True} if tolerance == "bits" else {}
    return profile, [replace(one, settings={**given, **one.settings}) for one in found]


def _powers(most: int) -> list[int]:
    """Return the powers of two up to a number, and the number."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def _steps(epochs: float | None, profile: Profile) -> int | None:
    if epochs is None:
        return None
    if profile.steps_per_epoch is None:
        raise ConfigError("--epochs: the data are a stream, whose length is unknown. Give --steps instead.")
    return math.ceil(epochs * profile.steps_per_epoch)


def _start(request: Request) -> None:
    from paceline.environments import env

    what = "profile" if env.PROFILE in request.environment else "a few steps"
    many = f"{request.workers} worker{'s' * (request.workers > 1)}"
    print(f"measuring: {what} on {many} ...", file=sys.stderr, flush=True)
    run_quietly(request)


def _values(one: Candidate, steps: int | None, pareto: bool) -> dict[str, Any]:
    """Return a candidate as data."""
    return {
        "strategy": one.strategy,
        "workers": one.workers,
        "settings": dict(one.settings),
        "machine": one.machine,
        "step_seconds": one.step_seconds,
        "low": one.low,
        "high": one.high,
        "memory_bytes": one.memory_bytes,
        "hours": None if steps is None else steps * one.step_seconds / 3600,
        "worker_hours": None if steps is None else steps * one.workers * one.step_seconds / 3600,
        "fits": one.fits,
        "pareto": pareto,
    }


def _rows(values: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("", "strategy", "workers", "step ms", "from", "to", "memory MB", "hours", "worker hours")
    ]
    for one in values:
        given = one["settings"].get("shard") or one["settings"].get("pipeline", {}).get("schedule") or ""
        times = [f"{1000 * one[name]:.1f}" for name in ("step_seconds", "low", "high")]
        whole = ["" if one[name] is None else f"{one[name]:.3g}" for name in ("hours", "worker_hours")]
        mark = "*" if one["pareto"] else "" if one["fits"] else "too large"
        strategy = f"{one['strategy']} {given}".strip()
        rows.append((mark, strategy, str(one["workers"]), *times, f"{one['memory_bytes'] / 1e6:,.1f}", *whole))
    return rows


def _prove(base: Request, ordered: Sequence[Candidate], count: int) -> list[str]:
    """Run the fastest plans and the slowest one, and return what was predicted beside what was measured."""
    from statistics import median

    from paceline.planning.trials import settings_text, steps_of

    rows: list[tuple[str, ...]] = [("plan", "predicted ms", "measured ms", "error")]
    errors = []
    for one in [*ordered[:count], *ordered[count:][-1:]]:
        seconds, _ = steps_of(base, one.workers, settings_text(one), _start)
        took = median(seconds)
        errors.append(abs(one.step_seconds / took - 1))
        error = f"{100 * (one.step_seconds / took - 1):+.0f} %"
        rows.append(
            (_rows([_values(one, None, False)])[1][1], f"{1000 * one.step_seconds:.1f}", f"{1000 * took:.1f}", error)
        )
    return [*table.lines(rows), f"mean error: {100 * sum(errors) / len(errors):.0f} %"]
