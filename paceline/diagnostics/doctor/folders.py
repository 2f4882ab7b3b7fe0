"""Checks of the folders that a run writes to, and of the folder that all machines share."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.diagnostics.doctor.finding import Finding, ok, size, skipped

_LITTLE_ROOM, _TOO_LITTLE_ROOM = 10**9, 100 * 10**6
_FEW_INODES = 1000
_TRIAL_BYTES = 8 << 20
_SLOW = 2 * 10**6
_FULL = "Checkpoints and records of the run go there; without room the next save fails, and training with it."


def room(check: str, folder: Path) -> Finding:
    """Check that a folder, or its nearest existing parent, is writable and has enough free space and inodes."""
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        about = os.statvfs(there)
    except OSError as error:
        full = error.errno == 28
        return Finding(
            check,
            "failure",
            f"{there} is full: {error.strerror}" if full else f"{there} is not writable: {error.strerror}",
            _FULL if full else "The run writes its output, events and checkpoints there.",
            f"free room on it (df -h {there})"
            if full
            else f"give the user {os.geteuid()} write permission, or choose another folder",
        )
    free = about.f_bavail * about.f_frsize
    values = f"{there}: {size(free)} free of {size(about.f_blocks * about.f_frsize)}"
    few = about.f_files > 0 and about.f_favail < _FEW_INODES
    if free >= _LITTLE_ROOM and not few:
        return ok(check, values)
    return Finding(
        check,
        "failure" if free < _TOO_LITTLE_ROOM or few else "warning",
        f"disk almost full: {values}" + (f", {about.f_favail} inodes" if few else ""),
        _FULL,
        f"free room on it (df -h {there}; df -i {there}), or choose another folder",
    )


def leave_mark(folder: Path, token: str, number: int) -> Finding:
    """Write this machine's mark into the shared folder and check the speed of the write."""
    check = "shared folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(_mark(folder, token, number), "xb") as file:
            started = time.monotonic()
            file.write(os.urandom(1 << 20) * (_TRIAL_BYTES >> 20))
            file.flush()
            os.fsync(file.fileno())
            speed = _TRIAL_BYTES / max(1e-6, time.monotonic() - started)
    except OSError as error:
        return Finding(
            check,
            "failure",
            f"{folder} cannot be written: {error.strerror}",
            "Every machine may be the one that writes the checkpoint.",
            f"mount it writable here, and give the user {os.geteuid()} write permission",
        )
    values = f"{folder} takes {size(speed)} a second"
    if speed >= _SLOW:
        return ok(check, values)
    return Finding(
        check,
        "warning",
        f"slow: {values}",
        "A checkpoint of a gigabyte then takes minutes, in which training may wait.",
        "choose a faster folder, save less often, or set checkpoint.background=true",
    )


def marks_seen(folder: Path, token: str, count: int) -> list[int]:
    """Return the numbers of the machines whose marks this machine sees in the folder."""
    return [number for number in range(count) if _mark(folder, token, number).exists()]


def remove_mark(folder: Path, token: str, number: int) -> None:
    with contextlib.suppress(OSError):
        _mark(folder, token, number).unlink()


def _mark(folder: Path, token: str, number: int) -> Path:
    return folder / f".paceline-doctor-{token}-{number}"


def check_shared(folder: str | None, seen: Mapping[int, Sequence[int]], names: Sequence[str]) -> Finding:
    """Check that all machines see each other's files.

    Args:
        seen: numbers of the machines whose marks each machine saw, by machine number.
    """
    check = "shared folder"
    if folder is None:
        return skipped(check, "none was given (--checkpoints)")
    missed = [
        f"{names[number]} does not see the files of {', '.join(names[other] for other in others)}"
        for number, found in seen.items()
        if (others := [other for other in seen if other not in found])
    ]
    if not missed:
        return ok(check, f"{folder}: all machines see each other's files")
    return Finding(
        check,
        "failure",
        f"{folder} is not shared: {'; '.join(missed)}",
        "A run that resumes reads the checkpoint on every machine; one without it starts from another step.",
        "mount the same file system (NFS, Lustre, ...) at this path on every machine, or use an object store",
    )


def temporary() -> Path:
    """Return the folder for temporary files, or ``/tmp`` if no such folder is writable."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return Path("/tmp")
