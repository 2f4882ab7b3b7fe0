"""``paceline.launch``: the equivalent of ``paceline run`` for functions, in scripts and notebooks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

import paceline
from paceline.cli import run
from paceline.cli.options import chosen_place, node_range, parsed_settings
from paceline.data.tables.engines import writer_of
from paceline.errors import ConfigError, RunFailed
from paceline.launchers import call_worker
from paceline.launchers.base import Request
from paceline.launchers.call_worker import CALL, ERROR, RESULT
from paceline.launchers.clusters.base import Options
from paceline.launchers.clusters.registry import LOCAL
from paceline.settings import Settings

_T = TypeVar("_T")


def launch(  # noqa: PLR0913 - each argument is an option of the command line
    function: Callable[..., _T],
    *arguments: Any,
    workers: int = 1,
    on: Any = "local",
    settings: Mapping[str, Any] | None = None,
    elastic: str | None = None,
    nodes: str | int | None = None,
    name: str | None = None,
    runs_dir: str | Path = "runs",
    patience: float = Request.patience_seconds,
    **place: Any,
) -> list[_T]:
    """Call a function in many worker processes and return the result of each worker.

    The function is sent to the workers by cloudpickle, so a notebook may define it. It runs in the same environment as
    a script under ``paceline run``: :func:`paceline.start` trains on all workers, the run has a directory, and Ctrl-C
    stops the run after a checkpoint. For several machines ``runs_dir`` must be a folder that all of them share.

    Args:
        function: function that each worker calls.
        *arguments: arguments of the function, the same on all workers. Spark or Ray first writes a DataFrame or Dataset
            to Parquet files beside the runs, once, and the function gets a :class:`paceline.ParquetDataset` instead.
        workers: number of workers on each machine.
        on: ``"local"``; ``"debug"``, which calls the function in this process as the only worker, for a debugger; a
            cluster, as for ``--on``; or a ``SparkSession``, which runs ``nodes`` tasks.
        settings: settings as for ``--set``, such as ``{"exact": True}``. They override those of :func:`paceline.start`.
        elastic: ``"MIN:MAX"`` workers. The run then continues after the loss of a worker.
        nodes: number of machines, or ``"MIN:MAX"``.
        name: name of the run. Defaults to the function's name with date and time.
        runs_dir: parent folder of the run directories.
        patience: seconds to wait while there are fewer workers or machines than the minimum. Defaults to 600.
        **place: options of the cluster, as on the command line, such as ``hosts="h1:4,h2:4"``, ``partition="gpu"``.

    Returns:
        the results of the workers that completed the function, in rank order.

    Raises:
        ConfigError: an argument cannot be used.
        RunFailed: the run failed without an exception of the function. If workers raised exceptions, the first
            exception is raised instead.
    """
    if not callable(function):
        raise ConfigError(
            f"launch calls a function, and was given {function!r}: start a script with `paceline run`, or call "
            f"launch(function, *its_arguments)."
        )
    _check(workers, runs_dir, settings=settings, elastic=elastic, nodes=nodes, name=name, patience=patience)
    if on == "debug":
        if workers != 1 or nodes is not None:
            raise ConfigError(
                f"on='debug' calls the function in this process, as the only worker, and workers is {workers}: leave "
                f"it out. With exact the result is that of any number of workers."
            )
        if not any(map(writer_of, arguments)):
            return [function(*arguments)]
        with _call_folder(runs_dir) as folder:
            return [function(*_readable(arguments, folder))]
    if not isinstance(on, str):
        on, place = "spark", {**place, "session": on}
    options = _options(place)
    if (found := chosen_place(on, options, None, quiet=False)) == LOCAL and nodes is not None:
        raise ConfigError(
            f"nodes = {nodes!r}: on='local' is this machine alone. Leave nodes out, or name the place that has several "
            f"machines, as in on='ssh', hosts='h1:4,h2:4'."
        )
    least, most = run.bounds(elastic, workers, 0, several=found != LOCAL or nodes is not None)
    own = getattr(function, "__name__", type(function).__name__).strip("<>")
    with _call_folder(runs_dir) as folder:
        runs = folder.parent
        request = Request(
            script=Path(call_worker.__file__),
            arguments=(str(folder),),
            workers=workers,
            settings=parsed_settings(settings),
            runs=runs,
            name=name or f"{own}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
            least=least,
            most=most,
            patience_seconds=patience,
            nodes=node_range(None if nodes is None else str(nodes), None, found == LOCAL),
        )
        _write(folder, function, _readable(arguments, folder))
        code = run.train(request) if found == LOCAL else run.train_on(found, request, options, dry_run=False)
        if code:
            raise _failure(runs / str(request.name), folder, code)
        return _results(runs / str(request.name), folder)


_TYPES = {
    "settings": (Mapping, "a dictionary, as in settings={'exact': True}"),
    "elastic": (str, "the fewest and the most workers, as in elastic='2:8'"),
    "nodes": (str | int, "a number of machines, or a range, as in nodes='2:4'"),
    "name": (str, "the name of the run, a text"),
    "patience": (int | float, "a number of seconds"),
}
"""Type and advice for each optional argument."""
_OPTION_TYPES: dict[str, tuple[Any, str]] = {
    "str | None": (str, "a text, as on the command line"),
    "Path | None": (str | Path, "the path of a file"),
    "int | None": (Integral, "a whole number"),
    "bool": (bool, "True or False"),
}
"""Type and advice for each annotation of :class:`Options`."""


def _check(workers: object, runs_dir: object, **given: object) -> None:
    """Check the types of arguments. On the command line they are strings, which the options parse."""
    if isinstance(workers, bool) or not isinstance(workers, Integral) or int(workers) < 1:
        raise ConfigError(f"workers = {workers!r}: give the number of workers of each machine, 1 or more.")
    if not isinstance(runs_dir, str | os.PathLike):
        raise ConfigError(f"runs_dir = {runs_dir!r}: give the path of a folder, as in runs_dir='runs'.")
    for argument, value in given.items():
        kind, cure = _TYPES[argument]
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{argument} = {value!r}: give {cure}.")


@contextlib.contextmanager
def _call_folder(runs_dir: str | Path) -> Iterator[Path]:
    """Provide a private folder beside the runs, in which this process and the workers exchange files."""
    runs = Path(runs_dir).absolute()
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".call-", dir=runs) as folder:
        yield Path(folder)


def _readable(arguments: tuple[Any, ...], folder: Path) -> tuple[Any, ...]:
    """Return the arguments, with Parquet datasets instead of engine tables that only this process could read."""
    readable = list(arguments)
    for place, one in enumerate(arguments):
        if writer := writer_of(one):
            readable[place] = getattr(paceline.ParquetDataset, writer)(one, folder / f"data-{place}")
    return tuple(readable)


def _options(place: Mapping[str, Any]) -> Options:
    known = {one.name for one in fields(Options)}
    if unknown := sorted(set(place) - known):
        name = unknown[0]
        cure = f"To pass a value to the function, give it by position: launch(f, {place[name]!r})."
        if name in Settings.model_fields:
            cure += f" To change the setting, write settings={{{name!r}: {place[name]!r}}}."
        raise ConfigError(f"launch has no argument {name!r}. {cure} Options of places: {', '.join(sorted(known))}.")
    kinds = {one.name: _OPTION_TYPES[str(one.type)] for one in fields(Options) if str(one.type) in _OPTION_TYPES}
    for name, value in place.items():
        kind, cure = kinds.get(name, (object, ""))
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is Integral)):
            raise ConfigError(f"{name} = {value!r}: give {cure}.")
    hostfile = place.get("hostfile")
    return Options(**{**place, "hostfile": None if hostfile is None else Path(hostfile)})


def _write(folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import cloudpickle

    try:
        sent = cloudpickle.dumps((function, arguments))
    except Exception as error:  # noqa: BLE001 - whatever an object's own code raises
        raise ConfigError(
            f"The function or its arguments cannot be sent to the workers: {error}. Make what cannot be pickled "
            f"(files, locks, sessions) inside the function."
        ) from None
    (folder / CALL).write_bytes(cloudpickle.dumps({"path": sys.path, "function": sent}))


def _results(run: Path, folder: Path) -> list[Any]:
    """Return the workers' results in the order of their last ranks, or of their numbers if they have not trained."""
    import cloudpickle

    found = {int(path.name.rpartition("-")[2]): path for path in folder.glob(f"{RESULT}-*")}
    ranks: list[int] = []
    records = run / "events" / "launcher.jsonl"
    for line in records.read_text().splitlines() if records.exists() else ():
        if (record := json.loads(line))["event"] == "membership":
            ranks = record["workers"]
    order = [*ranks, *sorted(found.keys() - set(ranks))]
    return [cloudpickle.loads(found[worker].read_bytes()) for worker in order if worker in found]


def _failure(run: Path, folder: Path, code: int) -> Exception:
    """Return the exception of the worker that failed first, or RunFailed if the function did not raise it."""
    import cloudpickle

    try:
        known = json.loads((run / "failure.json").read_text())
        text = (run / "failure.txt").read_text()
    except (OSError, ValueError):
        return RunFailed(f"The run {run.name} ended with exit code {code}; {run} holds its records.", code)
    kept = folder / f"{ERROR}-{known.get('worker')}"
    if not kept.exists():
        return RunFailed(text, code)
    error: Exception = cloudpickle.loads(kept.read_bytes())
    error.add_note(text)
    return error
