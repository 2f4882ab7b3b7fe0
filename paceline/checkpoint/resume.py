"""Find the checkpoint to resume from and read it, on all workers at once.

Each worker reads and checks some of the files, and sends the tensors in them to the others.
All load the same one: with ``auto`` the newest that every worker can read. A storage that fails is asked again, by all
workers in step, so that none waits alone for long. Only damage makes them pass over a checkpoint that is there.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint import files, load
from paceline.checkpoint.load import Content, MissingError, Reader
from paceline.checkpoint.manifest import DamagedError, Manifest, name_of, step_of
from paceline.checkpoint.storage import locations
from paceline.checkpoint.storage.base import Storage, split
from paceline.checkpoint.storage.retry import MISSING_SECONDS, Retries, may_pass
from paceline.comm.collectives.exchange import exchange, fill_from
from paceline.comm.shm.tensors import room_of, views_of
from paceline.comm.world import World
from paceline.errors import CheckpointError

_log = logging.getLogger("paceline")
_GOOD, _DAMAGED, _REFUSED, _FAILING, _MISSING, _REMOVED = "good", "damaged", "refused", "failing", "missing", "removed"
Check = Callable[[Path | str, Manifest], None]


@dataclass
class Search:
    """What was found.

    Attributes:
        location: of the checkpoint that was read; none if there is none.
        content: of it.
        damaged: the names of those that were passed over because they are damaged, and why.
        missing: locations of those that lack a file, and why.
    """

    location: Path | str | None = None
    content: Content | None = None
    damaged: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def read_newest(world: World, storage: Storage, check: Check, seconds: float) -> Search:
    """Read the newest checkpoint of a storage that all workers can read.

    Args:
        world: the workers.
        storage: of the run.
        check: refuses what does not fit, by its manifest.
        seconds: for how long to try again while the storage fails.

    Raises:
        CheckpointError: it was refused, or the storage failed for too long.
    """
    search = Search()
    while True:
        for name in complete(world, storage, seconds):
            if name in search.damaged or str(storage.location(name)) in search.missing:
                continue
            location = storage.location(name)
            content, kind, reason = _read_together(world, location, check, seconds, listed=storage)
            if content is not None:
                search.location, search.content = location, content
                return search
            if kind == _REMOVED:
                break
            if kind == _MISSING:
                search.missing[str(location)] = reason
            else:
                search.damaged[name] = reason
        else:
            return search


def read_named(world: World, resume: str, check: Check, seconds: float) -> tuple[Path | str, Content]:
    """Read the checkpoint at a path or URL; of a folder with several the newest.

    Raises:
        CheckpointError: it cannot be used.
    """
    location = locations.place(ask(world, lambda _: str(load.find(resume)), resume, seconds))
    content, _, reason = _read_together(world, location, check, seconds, listed=None)
    if content is None:
        raise CheckpointError(reason)
    return location, content


def complete(world: World, storage: Storage, seconds: float) -> list[str]:
    """The names of the complete checkpoints in a storage, the newest first, as rank 0 sees them.

    Raises:
        CheckpointError: it cannot be listed.
    """

    def look(elapsed: float) -> list[str]:
        latest, names = storage.latest(), storage.complete()
        step = step_of(split(names[0])[0]) if names else -1
        if latest > step and elapsed < MISSING_SECONDS:
            raise OSError(errno.ESTALE, f"{name_of(latest)} is the newest one by its file latest, and is not listed")
        return names

    found: list[str] = ask(world, look, storage.location(), seconds)
    return found


def ask(world: World, look: Callable[[float], Any], where: Path | str, seconds: float) -> Any:
    """Let rank 0 look into a storage, again while it fails, and tell all workers what it found.

    Args:
        world: the workers.
        look: gets the seconds since the first attempt.
        where: it looks, for errors.
        seconds: for how long to try.

    Raises:
        CheckpointError: it cannot be listed.
    """
    retries = Retries(seconds)
    while True:
        answer: tuple[str, Any] | None = None
        if world.rank == 0:
            try:
                answer = _GOOD, look(retries.elapsed)
            except Exception as error:  # noqa: BLE001 - each kind of store has errors of its own
                reason = f"{where} cannot be listed: {files.reason_of(error)}"
                answer = (
                    (_FAILING if may_pass(error) and retries.left() else _REFUSED),
                    reason + retries.duration(error),
                )
        kind, value = world.gather(answer, "start")[0]
        if kind == _GOOD:
            return value
        if kind == _REFUSED:
            raise CheckpointError(f"{value}.")
        retries.wait(value)


def _read_together(
    world: World, location: Path | str, check: Check, seconds: float, listed: Storage | None
) -> tuple[Content | None, str, str]:
    """The content of a checkpoint; or what is wrong for one of the workers, and so for all, and why.

    Raises:
        CheckpointError: a worker refuses it, or cannot read it, which says nothing about what it holds.
    """
    content, kind, reason, removed = None, "", "", False
    reader = Reader(world.rank, world.size)
    retries = Retries(seconds)
    while True:
        if kind == _MISSING and listed is not None and world.rank == 0:
            removed = _is_removed(listed, location)
        if content is None:
            content, kind, reason = _read(location, check, reader, retries)
        results = world.gather((kind, reason, retries.elapsed, removed), f"reading {location}")
        worst = next(
            (one for one in (_REFUSED, _DAMAGED, _FAILING, _MISSING) if any(one in it for it in results)), None
        )
        if worst is None:
            return content and _exchange(world, content, reader), _GOOD, ""
        said = _first(results, worst)
        elapsed = results[0][2]
        if results[0][3]:
            return None, _REMOVED, ""
        if worst == _REFUSED or (worst == _FAILING and elapsed >= seconds):
            raise CheckpointError(reason if kind == worst else said)
        limit = min(seconds, MISSING_SECONDS if listed is not None else 0.0)
        if worst == _DAMAGED or (worst == _MISSING and elapsed >= limit):
            return None, worst, said
        retries.wait(said)


def _exchange(world: World, content: Content, reader: Reader) -> Content:
    """Bring together what each worker has read of a checkpoint.

    Raises:
        WorkerLost: a worker was lost meanwhile.
    """
    if reader.of == 1:
        return content
    manifest, kinds, shares = content.manifest, {}, []
    end, named = 0, manifest.tensors_by_file()
    for number in range(reader.of):
        begin = end
        for file in Reader(number, reader.of).files_of(manifest):
            part = {name: manifest.kind_of(name) for name in named.get(file, ())}
            kinds.update(part)
            end += room_of(part)
        shares.append(range(begin, end))
    flat = exchange(world, shares, range(world.size), fill_from(content.tensors.values(), shares[world.rank].start))
    assert flat is not None
    tensors = views_of(flat, kinds)
    return Content(manifest, {name: tensors[name] for name in manifest.tensors})


def _read(location: Path | str, check: Check, reader: Reader, retries: Retries) -> tuple[Content | None, str, str]:
    try:
        return load.read(location, check, reader), _GOOD, ""
    except DamagedError as error:
        return None, _DAMAGED, str(error)
    except MissingError as error:
        return None, _MISSING, str(error)
    except CheckpointError as error:
        return None, _REFUSED, str(error)
    except Exception as error:  # noqa: BLE001 - each kind of store has errors of its own
        reason = f"{location} cannot be read: {files.reason_of(error)}{retries.duration(error)}. All checkpoints stay."
        return None, _FAILING if may_pass(error) else _REFUSED, reason


def _is_removed(storage: Storage, location: Path | str) -> bool:
    """Whether a checkpoint was removed since it was listed, because there are newer ones."""
    try:
        return str(location) not in {str(storage.location(name)) for name in storage.complete()}
    except Exception:  # noqa: BLE001 - then it is not known yet
        return False


def _first(results: Sequence[Sequence[Any]], kind: str) -> str:
    """What the first worker with this result says."""
    reasons = {rank: one[1] for rank, one in enumerate(results) if one[0] == kind}
    rank, first = next(iter(reasons.items()))
    return f"rank {rank}: {first}" if len(reasons) < len(results) else str(first)
