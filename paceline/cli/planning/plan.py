"""``paceline plan``: measure a script for some seconds, and predict how long training takes in other ways."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.display import table
from paceline.cli.options import Arguments, Plan, Script, Set, parsed_settings
from paceline.cli.report import run_quietly
from paceline.environments import env
from paceline.errors import ConfigError, RunFailed, counted
from paceline.launchers.base import Request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.planning.search import Candidate

_SAVED = "strategy", "workers", "settings", "machine", "machines", "spot", "standbys", "step_seconds", "low", "high"
CONTEXT = {"allow_interspersed_args": True, "ignore_unknown_options": True}
MORE_HELP = """ The script trains for a few steps with 1 worker, 2 workers and more, up to the cores of this machine.

Options may also follow the script; what follows -- is passed to the script.

Exit code: 1 if the script ends without training, 2 if an option cannot be used or nothing fits.
"""


def command(  # noqa: PLR0913 - each argument is an option
    script: Script,
    arguments: Arguments = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", "-n", help="Largest number of workers.", show_default="cores here, or 8 machines to rent"
        ),
    ] = 0,
    link: Annotated[
        str,
        typer.Option(
            help="Give each worker its own machine, with a link of this many Mbit/s: 1000, or one each: 1000,1000,200.",
            metavar="MBIT",
            show_default=False,
        ),
    ] = "",
    speeds: Annotated[
        str,
        typer.Option(
            help="Speed of each of these machines, relative to this one: 1,1,0.5.",
            metavar="NUMBERS",
            show_default=False,
        ),
    ] = "",
    latency: Annotated[float, typer.Option(help="Milliseconds that a message takes on that link.")] = 0.2,
    memory: Annotated[
        float | None, typer.Option(help="Memory of a worker, in GB; unlimited by default.", metavar="GB")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the whole training.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs of the whole training, instead of --steps.")] = None,
    tolerance: Annotated[
        str, typer.Option(help="bits: exact; rounding: what one process computes; convergent: also local training.")
    ] = "rounding",
    machines: Annotated[
        str | None,
        typer.Option(help="Types of machines to rent: a TOML file, or names of known ones.", metavar="FILE|NAMES"),
    ] = None,
    here: Annotated[
        str | None, typer.Option(help="Type of this machine, from which times are scaled to others.", metavar="NAME")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Offer machines that the provider may take away, too.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Recorded interruptions of such machines (CSV).", metavar="FILE")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="Show plans that end in time, the cheapest first: 90m, 24h, 3d.", metavar="TIME")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Show plans that cost at most this, the fastest first.", metavar="MONEY")
    ] = None,
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
    from paceline.planning.query import Query
    from paceline.planning.search import explained, front

    _check(prove, bool(link) or machines is not None, as_json, save)
    rates, paces = _numbers("link", link), _numbers("speeds", speeds)
    query = Query(
        workers, rates, paces, latency, memory, steps, epochs, tolerance, machines, here, spot, trace, deadline, budget
    )
    settings = config.parse_command_line(set_ or [])
    base = Request(script, tuple(arguments or ()), settings=settings, plan=plan_)
    profile, total, ordered, too_large = query.candidates(base, _start)
    first, pareto = ordered[0], front(ordered)
    if save is not None:
        written = _values(first, total, pareto=True)
        given = {key: config.parse_value(value) for key, value in base.settings.items()}
        written["settings"] = config.flattened(written["settings"]) | given
        kept = {"script": script.name} | {key: written[key] for key in _SAVED}
        save.write_text(json.dumps(kept, indent=1) + "\n")
    if as_json:
        print(json.dumps([_values(one, total, one in pareto) for one in (*ordered, *too_large)], indent=1))
        return
    shown = {(one.strategy, one.machine, one.spot): one for one in reversed(ordered)}.values()
    rows = [
        _values(one, total, one in pareto)
        for one in (*ordered, *too_large)
        if machines is None or one in pareto or one in shown
    ]
    print(f"{profile.model}, batches of {profile.batch} in {profile.microbatches} microbatches")
    if profile.uncut:
        print(f"No pipelines, as the model cannot be cut: {profile.uncut}")
    for line in query.market.extrapolated(profile) if query.market else ():
        print(line)
    print("\n" + "\n".join(table.lines(_rows(rows))))
    print("\n" + "\n".join(explained(ordered, query.word)))
    if save is not None:
        again = ["paceline", "run", "--plan", save, script, *(arguments or ())]
        many = "a machine for each worker" if link else f"{first.machines + first.standbys} {first.machine}"
        where = f", with {many} (--hosts, or --on)" if link or machines else ""
        print(f"Written to {save}: {shlex.join(map(str, again))}{where}")
    if prove:
        print("\n" + "\n".join(_prove(base, ordered, prove)))


def _numbers(option: str, text: str) -> list[float]:
    """Return the numbers between commas."""
    try:
        return [float(one) for one in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"--{option} {text}: give a number, or a number for each machine with commas.") from None


def _check(prove: int, elsewhere: bool, as_json: bool, save: Path | None) -> None:
    """Raise ConfigError for options that cannot be used together."""
    if prove < 0:
        raise ConfigError(f"--prove {prove}: give the number of plans to run.")
    if prove and elsewhere:
        raise ConfigError("--prove runs plans on this machine: leave out --link and --machines.")
    if prove and as_json:
        raise ConfigError("--prove prints a table, not --json: leave out one of them.")
    if save is not None and save.suffix != ".json":
        raise ConfigError(f"--save {save}: give a name that ends in .json.")
    if save is not None and (save.is_dir() or not save.absolute().parent.is_dir()):
        raise ConfigError(f"--save {save}: give a file in a folder that exists.")


def plan(  # noqa: PLR0913 - each argument is an option
    script: str | Path,
    *arguments: str,
    workers: int | None = None,
    link: float | Sequence[float] = (),
    speeds: float | Sequence[float] = (),
    latency: float = 0.2,
    memory: float | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    tolerance: str = "rounding",
    machines: str | None = None,
    here: str | None = None,
    spot: bool = False,
    trace: str | Path | None = None,
    deadline: str | None = None,
    budget: float | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[Candidate]:
    """Predict how long a step takes with each strategy and number of workers, as ``paceline plan`` does.

    The script trains for a few steps with 1 worker, 2 workers and more, up to the cores of this machine.

    Args:
        script: script that trains.
        *arguments: arguments of the script.
        workers: largest number of workers. Defaults to the cores of this machine, or to 8 machines to rent.
        link: bandwidth in Mbit/s if each worker has a machine of its own: a number for all machines, or a list with
            a number for each. By default, all workers are on this machine.
        speeds: speed of these machines relative to this one, for all or for each. Defaults to the same speed.
        latency: milliseconds that a message takes on that link.
        memory: memory of a worker in GB. Defaults to unlimited memory.
        steps: steps of the whole training.
        epochs: epochs of the whole training, instead of ``steps``.
        tolerance: ``"rounding"`` for strategies that compute what one process computes, ``"bits"`` for those with
            ``exact``, ``"convergent"`` also for local training.
        machines: types of machines to rent: a TOML file, or names of types of the package's table, with commas between.
        here: type of this machine. The times of the others are scaled from it.
        spot: whether to offer machines that the provider may take away, too.
        trace: CSV file of recorded interruptions of such machines. By default each type has its own rate.
        deadline: longest time, such as ``"24h"``. The candidates are those within it, the cheapest first.
        budget: most money. The candidates are those within it, the fastest first.
        settings: settings as for ``--set``.

    Returns:
        the candidates that fit: the fastest first, or the cheapest of machines to rent without a ``budget``.

    Raises:
        ConfigError: an argument cannot be used, or nothing fits into the memory or the limits.
        InputError: the script does not train, or takes too few steps.
        RunFailed: the script failed.
    """
    from paceline.planning.query import Query

    recorded = None if trace is None else Path(trace)
    rates, paces = ((many,) if isinstance(many, int | float) else many for many in (link, speeds))
    query = Query(
        workers or 0,
        rates,
        paces,
        latency,
        memory,
        steps,
        epochs,
        tolerance,
        machines,
        here,
        spot,
        recorded,
        deadline,
        budget,
    )
    try:
        return query.candidates(Request(Path(script), arguments, settings=parsed_settings(settings)), _start)[2]
    except typer.Exit as error:
        raise RunFailed(f"{script} failed with exit code {error.exit_code}; its report is above.") from None


def _start(request: Request) -> None:
    what = "profile" if env.PROFILE in request.environment else "a few steps"
    print(f"measuring: {what} on {counted(request.workers, 'worker')} ...", file=sys.stderr, flush=True)
    run_quietly(request)


def _values(one: Candidate, steps: int | None, pareto: bool) -> dict[str, Any]:
    """Return a candidate as data. Values that are unknown or infinite are None."""
    seconds, bill = math.inf if steps is None else steps * one.step_seconds, one.bill
    hours = seconds / 3600 if bill is None else bill.hours.mean
    values = {
        "strategy": one.strategy,
        "workers": one.workers,
        "settings": dict(one.settings),
        "machine": one.machine,
        "machines": one.machines,
        "spot": one.spot,
        "standbys": one.standbys,
        "step_seconds": one.step_seconds,
        "low": one.low,
        "high": one.high,
        "memory_bytes": one.memory_bytes,
        "hours": hours,
        "worker_hours": one.workers * hours,
        "money": None if bill is None else bill.money.mean,
        "money_low": None if bill is None else bill.money.low,
        "money_high": None if bill is None else bill.money.high,
        "currency": None if bill is None else bill.currency,
        "kilowatt_hours": None if bill is None or bill.kilowatt_hours is None else bill.kilowatt_hours.mean,
        "fits": one.fits,
        "pareto": pareto,
    }
    return {key: None if value == math.inf else value for key, value in values.items()}


def _rows(values: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    from paceline.planning.search import variant

    rented = any(one["currency"] for one in values)
    what = ("machines", "hours", f"{values[0]['currency']}, from to") if rented else ("hours", "worker hours")
    rows: list[tuple[str, ...]] = [("", "strategy", "workers", "step ms", "from", "to", "memory MB", *what)]
    for one in values:
        given = variant(one["settings"])
        times = [f"{1000 * one[name]:.1f}" for name in ("step_seconds", "low", "high")]
        mark = "*" if one["pareto"] else "" if one["fits"] else "too large"
        whole = [_short(one["hours"])]
        if rented:
            waiting = f" + {one['standbys']}" if one["standbys"] else ""
            many = f"{one['machines']}{waiting} {one['machine']}{' spot' * one['spot']}"
            whole = [many, *whole, " ".join(_short(one[name]) for name in ("money", "money_low", "money_high"))]
        else:
            whole.append(_short(one["worker_hours"]))
        strategy = f"{one['strategy']} {given}".strip()
        rows.append((mark, strategy, str(one["workers"]), *times, f"{one['memory_bytes'] / 1e6:,.1f}", *whole))
    return rows


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _prove(base: Request, ordered: Sequence[Candidate], count: int) -> list[str]:
    """Run the fastest plans and the slowest one, and return the predictions beside the measurements."""
    from paceline.planning.trials import settings_text, steps_of

    rows: list[tuple[str, ...]] = [("plan", "predicted ms", "measured ms", "error", "predicted MB", "measured MB")]
    errors = []
    for one in [*ordered[:count], *ordered[count:][-1:]]:
        trial = steps_of(base, one.workers, settings_text(one), _start)
        took = median(trial.seconds) if one.meets else fmean(trial.seconds)
        errors.append(abs(one.step_seconds / took - 1))
        error = f"{100 * (one.step_seconds / took - 1):+.0f} %"
        name, memory = _rows([_values(one, None, False)])[1][1], trial.memory_bytes
        times = f"{1000 * one.step_seconds:.1f}", f"{1000 * took:.1f}", error
        sizes = f"{one.memory_bytes / 1e6:.0f}", "unknown" if memory is None else f"{memory / 1e6:.0f}"
        rows.append((name, *times, *sizes))
    return [*table.lines(rows), f"mean error: {100 * sum(errors) / len(errors):.0f} %"]
