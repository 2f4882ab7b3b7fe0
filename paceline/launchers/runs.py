"""The directory of a run::

runs/<name>/
  launch.json            what was started, when, on what
  lock                   which launcher holds the directory now
  output/rank-<r>.log    everything that a worker printed; worker-<n>.log of those that were started to join later
  events/rank-<r>.jsonl  what happened (see paceline.events)
  errors/rank-<r>.json   why a worker failed
  failure.txt, .json     why the run failed, if it did: in words, and as data
  timeline.html          what `paceline timeline` has drawn
  checkpoints/step-*/    a checkpoint is complete when its manifest.json is there, one level down
  trackers/, media/      what trackers and session.log have written
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.config import quoted
from paceline.errors import ConfigError
from paceline.launchers.base import Launch, Machine, Request
from paceline.launchers.lease import Lease
from paceline.system.masking import mask
from paceline.system.regular_files import read_text

_LONGEST_NAME = 200
"""Bytes: a file system takes 255, and the files of a run add to it."""


def choose(request: Request, now: float | None = None) -> Path:
    """The directory for this run, absolute; it exists already when the run resumes.

    Raises:
        ConfigError: the name is no name of a directory, or is taken.
    """
    return _old(request) or _new(request, now)


def _old(request: Request) -> Path | None:
    """The directory that is there to resume; on a machine that joins, that of the first machine."""
    runs = request.runs.absolute()
    if request.name is not None:
        run = _named(runs, request.name)
        return run if request.first or (request.resume is not None and run.exists()) else None
    return newest_resumable(runs, request.script) if request.resume == "auto" else None


def _new(request: Request, now: float | None = None) -> Path:
    """A directory that is not there."""
    runs = request.runs.absolute()
    if request.name is not None:
        run = _named(runs, request.name)
        if run.exists():
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
    """Create the directory for this run, or take an old one to resume; no other launcher has it until the end.

    Raises:
        ConfigError: the name is no name of a directory, or is taken; or the directory cannot be written.
    """
    while (run := _old(request)) is None:
        run = _new(request)
        try:
            _create(run, request)
            break
        except FileExistsError:  # another launcher was quicker
            continue
        except OSError as error:
            raise _unwritable(run, error) from None
    if request.first:  # the first machine has it
        yield run
        return
    try:
        lease = Lease(run)
    except OSError as error:
        raise _unwritable(run, error) from None
    with contextlib.closing(lease):
        yield run


def _create(run: Path, request: Request) -> None:
    run.parent.mkdir(parents=True, exist_ok=True)
    run.mkdir(mode=0o700)
    run.chmod(request.runs_mode)


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
    """What the names of a script's runs begin with; a name of a directory has 255 bytes."""
    return os.fsencode(script.stem)[:_LONGEST_NAME].decode(errors="ignore")


def found(runs: Path, run: str | None) -> Path:
    """The directory of a run that is there.

    Args:
        runs: where the directories of the runs stand.
        run: the name of one of them, or any directory of a run; none: the one that was started last.

    Raises:
        ConfigError: there is none.
    """
    started = sorted(runs.glob("*/launch.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    newest = [path.parent for path in started]
    if run is None and newest:
        return newest[0]
    for folder in (runs / run, Path(run)) if run else ():
        if folder.is_dir():
            return folder
    there = f"There are {', '.join(path.name for path in newest)}" if newest else f"There are no runs in {runs}"
    missing = "" if run is None else f"There is no run {run!r}. "
    raise ConfigError(f"{missing}{there}; give their directory with --runs-dir.")


def newest_resumable(runs: Path, script: Path) -> Path | None:
    """The run of this script with the newest complete checkpoint."""
    found = []
    for run in sorted(runs.glob("*/")):
        manifest = newest_manifest(run)
        if manifest is not None and run.name.startswith(f"{_prefix(script)}-") and _stem(run) == script.stem:
            found.append((manifest.stat().st_mtime, run))
    return max(found)[1] if found else None


def newest_manifest(run: Path) -> Path | None:
    """The manifest of the newest complete checkpoint of a run."""
    manifests = list(run.glob("checkpoints/step-*/**/manifest.json"))
    return max(manifests, key=lambda path: path.stat().st_mtime, default=None)


def newest_checkpoint(run: Path) -> tuple[str, int, float] | None:
    """The path or URL of the newest complete checkpoint, its step, and when it was written, in seconds since 1970.

    Looked for in the directory of the run, or else, when checkpoints go elsewhere, in its records.
    """
    manifest = newest_manifest(run)
    if manifest is not None:
        step = run / "checkpoints" / manifest.relative_to(run).parts[1]
        name = step.name.rpartition("-")[2]
        return str(step), int(name) if name.isdecimal() else 0, manifest.stat().st_mtime
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
    """Create the directory, or make an old one ready to continue: its output stays, its errors go.

    Raises:
        ConfigError: the directory cannot be written.
    """
    try:
        with contextlib.suppress(FileExistsError):
            _create(launch.run, request)
        for name in ("output", "events", "errors", "checkpoints"):
            (launch.run / name).mkdir(exist_ok=True)
        if not request.first:
            for old in [*launch.run.glob("errors/*.json"), *launch.run.glob("failure.*")]:
                old.unlink()
        facts = json.dumps(_facts(launch, request, machine), indent=2)
        name = f"launch-{request.first}.json" if request.first else "launch.json"
        (launch.run / name).write_text(facts + "\n")
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


def version(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
