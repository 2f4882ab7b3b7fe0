"""Run directories::

runs/<name>/
  launch.json            command, settings, time and machine of the launch
  lock                   launcher that currently holds the directory
  output/rank-<r>.log    entire output of a worker; worker-<n>.log for workers started after the launch
  events/rank-<r>.jsonl  event records (see paceline.events)
  errors/rank-<r>.json   failure report of a worker
  failure.txt, .json     failure report of the run, if it failed: as text and as data
  logs.sqlite            index of `paceline logs`
  trace.pftrace          output of `paceline trace`
  checkpoints/step-*/    a checkpoint is complete when it has a manifest.json, one level down
  trackers/, media/      output of trackers and session.log
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.config import quoted
from paceline.errors import ConfigError
from paceline.launchers.base import Launch, Machine, Request
from paceline.launchers.lease import lease
from paceline.system.installed import version
from paceline.system.masking import mask
from paceline.system.regular_files import read_text

_LONGEST_NAME = 200  # Maximum length in bytes. File systems allow 255, and names derived from it are longer.


def choose(request: Request, now: float | None = None) -> Path:
    """Return the absolute path of this run's directory. The directory exists already if the run resumes.

    Raises:
        ConfigError: the name is not a valid directory name, or is taken.
    """
    return _old(request) or _new(request, now)


def _old(request: Request) -> Path | None:
    """Return the existing directory to resume, or None. A joining machine uses the first machine's directory."""
    runs = request.runs.absolute()
    if request.name is not None:
        run = _named(runs, request.name)
        return run if request.first or (request.resume is not None and run.exists()) else None
    return newest_resumable(runs, request.script) if request.resume == "auto" else None


def _new(request: Request, now: float | None = None) -> Path:
    """Return the path of a new directory. Another launcher may create it before this one does."""
    runs = request.runs.absolute()
    if request.name is not None:
        run = _named(runs, request.name)
        if request.resume is None and run.exists():
            raise ConfigError(
                f"The run {run} exists already. Continue it with --resume auto, or choose another --name."
            )
        return run
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    run = first = runs / f"{_prefix(request.script)}-{stamp}"
    number = 2
    while run.exists():
        run = first.with_name(f"{first.name}-{number}")
        number += 1
    return run


@contextlib.contextmanager
def claim(request: Request) -> Iterator[Path]:
    """Create this run's directory or reuse the one to resume, and lock it until the ``with`` block ends."""
    while (run := _old(request)) is None:
        run = _new(request)
        try:
            _create(run)
            break
        except FileExistsError:  # another launcher created it first
            continue
        except OSError as error:
            raise _unwritable(run, error) from None
    with contextlib.ExitStack() as held:
        if not request.first:  # the first machine holds the lock
            try:
                held.enter_context(lease(run))
            except OSError as error:
                raise _unwritable(run, error) from None
        yield run


def _create(run: Path) -> None:
    run.parent.mkdir(parents=True, exist_ok=True)
    run.mkdir(mode=0o700)


def _unwritable(run: Path, error: OSError) -> ConfigError:
    return ConfigError(f"The run directory {run} cannot be written: {error.strerror}.")


def _named(runs: Path, name: str) -> Path:
    if not name or name in (".", "..") or "/" in name or not name.isprintable():
        raise ConfigError(
            f"--name {quoted(name)} cannot be the name of a directory; choose its parent with --runs-dir."
        )
    if len(os.fsencode(name)) > _LONGEST_NAME:
        raise ConfigError(f"--name {quoted(name)} is too long: {len(os.fsencode(name))} bytes, of {_LONGEST_NAME}.")
    return runs / name


def _prefix(script: Path) -> str:
    """Return the prefix of a script's run names, cut because a directory name has at most 255 bytes."""
    return os.fsencode(script.stem)[:_LONGEST_NAME].decode(errors="ignore")


def newest(runs: Path) -> list[Path]:
    """Return the directories of the runs in a folder, the run that was started last first."""
    return [path.parent for _, path in sorted(_dated(runs.glob("*/launch.json")), reverse=True)]


def found(runs: Path, run: str | None) -> Path:
    """Return the directory of an existing run.

    Args:
        run: name of a run in `runs`, or path of any run directory. None selects the run that was started last.
    """
    there = newest(runs)
    if run is None and there:
        return there[0]
    for folder in (runs / run, Path(run)) if run else ():
        if folder.is_dir():
            return folder
    known = f"There are {', '.join(path.name for path in there)}" if there else f"There are no runs in {runs}"
    missing = "" if run is None else f"There is no run {run!r}. "
    raise ConfigError(f"{missing}{known}; give their directory with --runs-dir.")


def newest_resumable(runs: Path, script: Path, any_name: bool = False) -> Path | None:
    """Return the directory of this script's run with the newest complete checkpoint, or None.

    Args:
        any_name: whether to include runs with a name that the user chose.
    """
    found = []
    for run in sorted(runs.glob("*/")):
        ours = (any_name or run.name.startswith(f"{_prefix(script)}-")) and _stem(run) == script.stem
        if ours and (newest := newest_manifest(run)) is not None:
            found.append((newest[0], run))
    return max(found)[1] if found else None


def newest_manifest(run: Path) -> tuple[float, Path] | None:
    """Return the time and path of the manifest of a run's newest complete checkpoint, or None.

    A run that is training removes old checkpoints at any time.
    """
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(FileNotFoundError):
        for step in list(run.glob("checkpoints/step-*")):
            with contextlib.suppress(FileNotFoundError):
                found += _dated(step.glob("**/manifest.json"))
    return max(found, default=None)


def _dated(paths: Iterable[Path]) -> Iterator[tuple[float, Path]]:
    """Yield the files with the times of their last change, without those that are gone."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield path.stat().st_mtime, path


def newest_checkpoint(run: Path) -> tuple[str, int, float] | None:
    """Return path or URL, step and time of a run's newest complete checkpoint, or None. Time is in seconds since 1970.

    Searches the run directory first, then the events of rank 0, which also record checkpoints stored elsewhere.
    """
    if (newest := newest_manifest(run)) is not None:
        step = run / "checkpoints" / newest[1].relative_to(run).parts[1]
        name = step.name.rpartition("-")[2]
        return str(step), int(name) if name.isdecimal() else 0, newest[0]
    try:
        lines = read_text(run / "events" / "rank-0.jsonl").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in reversed(lines):
        if '"event": "checkpoint"' in line:
            try:
                record = json.loads(line)
                return str(record["path"]), int(record["step"]), float(record["time"])
            except (ValueError, KeyError, TypeError):
                continue
    return None


def _stem(run: Path) -> str | None:
    try:
        return Path(json.loads(read_text(run / "launch.json"))["script"]).stem
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def make(launch: Launch, request: Request, machine: Machine) -> None:
    """Create the run directory, or prepare an existing one to resume: keep its output, delete its failure reports."""
    try:
        with contextlib.suppress(FileExistsError):
            _create(launch.run)
        for name in ("output", "events", "errors", "checkpoints"):
            (launch.run / name).mkdir(exist_ok=True)
        if not request.first:
            for old in [*launch.run.glob("errors/*.json"), *launch.run.glob("failure.*")]:
                old.unlink()
        facts = json.dumps(_facts(launch, request, machine), indent=2)
        name = f"launch-{request.first}.json" if request.first else "launch.json"
        (launch.run / f".{name}").write_text(facts + "\n")
        (launch.run / f".{name}").replace(launch.run / name)  # a launcher that looks for runs reads a whole file
    except OSError as error:
        raise _unwritable(launch.run, error) from None


def _facts(launch: Launch, request: Request, machine: Machine) -> dict[str, object]:
    return {
        "script": str(launch.script.absolute()),
        "arguments": mask(launch.arguments),
        "command": mask(launch.command()),
        "directory": str(Path.cwd()),
        "workers": launch.workers,
        "settings": {key: mask([value])[0] for key, value in request.settings.items()},
        "plan": str(request.plan.absolute()) if request.plan else None,
        "port": int(launch.environment["MASTER_PORT"]),
        "threads": launch.environment["OMP_NUM_THREADS"],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "cores": len(machine.cores),
        "memory_domains": max(1, len(machine.domains)),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("paceline", "torch", "numpy")},
    }
