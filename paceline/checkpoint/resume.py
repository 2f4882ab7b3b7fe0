"""Search for the checkpoint to resume from, and collective read of it by all workers.

Each worker reads and checks a share of the files, and sends their tensors to the others. If the workers divide the
state, they exchange only what each of them needs (``load.SharedRead``). All workers load the same
checkpoint: with ``auto`` the newest that every worker can read. Workers retry a failing storage in lockstep, so that no
worker waits alone for long. An existing checkpoint is skipped only if it is damaged.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint import files, load
from paceline.checkpoint.load import Content, MissingError, Reader, Shares
from paceline.checkpoint.manifest import EARLIER, DamagedError, Manifest, name_of, parse, step_of
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
    """Result of a search."""

    location: Path | str | None = None  # location of the checkpoint that was read, or None
    content: Content | None = None  # content of that checkpoint, or None
    # names of checkpoints that were skipped because they are damaged, with the reason
    damaged: dict[str, str] = field(default_factory=dict)
    # locations of checkpoints that were skipped because a file is missing, with the reason
    missing: dict[str, str] = field(default_factory=dict)


def read_newest(world: World, storage: Storage, check: Check, seconds: float, shares: Shares | None = None) -> Search:
    """Read the newest checkpoint of a storage that all workers can read.

    Args:
        check: function that raises if a manifest does not fit the run.
        shares: division of the state, if each worker is to read its share only. Defaults to reading all of it.

    Raises:
        CheckpointError: the checkpoint was refused, or the storage failed until the timeout.
    """
    search = Search()
    while True:
        for name in complete(world, storage, seconds):
            if name in search.damaged or str(storage.location(name)) in search.missing:
                continue
            location = storage.location(name)
            content, kind, reason = _read_together(world, location, check, seconds, storage, shares)
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


def read_named(
    world: World, resume: str, check: Check, seconds: float, shares: Shares | None = None
) -> tuple[Path | str, Content]:
    """Read the checkpoint at a path or URL, or the newest checkpoint in a folder. Return its location and content."""
    location = locations.place(ask(world, lambda _: str(load.find(resume)), resume, seconds))
    content, _, reason = _read_together(world, location, check, seconds, None, shares)
    if content is None:
        raise CheckpointError(reason)
    return location, content


def complete(world: World, storage: Storage, seconds: float) -> list[str]:
    """Return the names of the complete checkpoints in a storage, newest first, as rank 0 sees them.

    Raises:
        CheckpointError: the storage cannot be listed.
    """

    def look(elapsed: float) -> list[str]:
        latest, names = storage.latest(), storage.complete()
        step = step_of(split(names[0])[0]) if names else -1
        if latest > step and elapsed < MISSING_SECONDS:
            raise OSError(errno.ESTALE, f"{name_of(latest)} is the newest one by its file latest, and is not listed")
        return names

    found: list[str] = ask(world, look, storage.location(), seconds)
    return found


def two_runs(storage: Storage, location: Path | str, saved: Manifest) -> str:
    """Return an error text if the next older readable checkpoint belongs to another run, otherwise ''."""
    names = storage.complete()
    places = [place for place, name in enumerate(names) if locations.same(location, storage.location(name))]
    for name in names[places[0] + 1 :] if places else ():
        try:
            before = parse(storage.manifest(name), storage.location(name))
            other = dict(before.state)["run"]
        except (CheckpointError, ValueError, LookupError, TypeError):
            continue
        if other == saved.state["run"]:
            return ""
        return (
            f"{location} and {storage.location(name)} are checkpoints of two runs. Remove those of the other run, or "
            f"choose another checkpoint.directory."
        )
    return ""


def ask(world: World, look: Callable[[float], Any], where: Path | str, seconds: float) -> Any:
    """Query a storage on rank 0, with retries while it fails, and return the result on all workers.

    Args:
        look: query, called with the seconds since the first attempt.
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
    world: World, location: Path | str, check: Check, seconds: float, listed: Storage | None, shares: Shares | None
) -> tuple[Content | None, str, str]:
    """Read a checkpoint on all workers. Return content, the worst kind of result of any worker, and its reason.

    With ``shares``, the content is this worker's share.
    """
    together = partial(_together, world, location, seconds, listed)
    found: list[Content] = []
    if shares is not None and world.size > 1:
        kind, reason = together(lambda: found.append(Content(load.read_checked(location, check), {})))
        if kind != _GOOD:
            return None, kind, reason
        if found[0].manifest.format != EARLIER:
            return _read_shares(world, location, found[0].manifest, shares, together)
        found.clear()
    reader = Reader(world.rank, world.size)
    kind, reason = together(lambda: found.append(load.read(location, check, reader)))
    return (_exchange(world, found[0], reader) if kind == _GOOD else None), kind, reason


def _read_shares(
    world: World, location: Path | str, manifest: Manifest, shares: Shares, together: Callable[..., tuple[str, str]]
) -> tuple[Content | None, str, str]:
    reading = load.read_shares(world, location, manifest, shares)
    steps = [*(partial(load.read_part, location, reading, number) for number in range(reading.rounds))]
    for number, step in enumerate([*steps, partial(load.read_part, location, reading, None)]):
        kind, reason = together(step)
        if kind != _GOOD:
            return None, kind, reason
        if number < reading.rounds:
            reading.exchange(number)
    return Content(manifest, reading.tensors), _GOOD, ""


def _together(
    world: World, location: Path | str, seconds: float, listed: Storage | None, act: Callable[[], object]
) -> tuple[str, str]:
    """Read on all workers until all have succeeded. Return the worst kind of result of any worker, and its reason."""
    done, kind, reason, removed = False, "", "", False
    retries = Retries(seconds)
    while True:
        if kind == _MISSING and listed is not None and world.rank == 0:
            removed = _is_removed(listed, location)
        if not done:
            kind, reason = _attempt(location, act, retries)
            done = kind == _GOOD
        results = world.gather((kind, reason, retries.elapsed, removed), f"reading {location}")
        worst = next(
            (one for one in (_REFUSED, _DAMAGED, _FAILING, _MISSING) if any(one in it for it in results)), None
        )
        if worst is None:
            return _GOOD, ""
        said = _first(results, worst)
        elapsed = results[0][2]
        if results[0][3]:
            return _REMOVED, ""
        if worst == _REFUSED or (worst == _FAILING and elapsed >= seconds):
            raise CheckpointError(reason if kind == worst else said)
        limit = min(seconds, MISSING_SECONDS if listed is not None else 0.0)
        if worst == _DAMAGED or (worst == _MISSING and elapsed >= limit):
            return worst, said
        retries.wait(said)


def _exchange(world: World, content: Content, reader: Reader) -> Content:
    """Exchange the tensors that the workers have read, so that each has the complete checkpoint."""
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


def _attempt(location: Path | str, act: Callable[[], object], retries: Retries) -> tuple[str, str]:
    try:
        act()
        return _GOOD, ""
    except DamagedError as error:
        return _DAMAGED, str(error)
    except MissingError as error:
        return _MISSING, str(error)
    except CheckpointError as error:
        return _REFUSED, str(error)
    except Exception as error:  # noqa: BLE001 - each kind of store has errors of its own
        reason = f"{location} cannot be read: {files.reason_of(error)}{retries.duration(error)}. All checkpoints stay."
        return _FAILING if may_pass(error) else _REFUSED, reason


def _is_removed(storage: Storage, location: Path | str) -> bool:
    """Return whether a checkpoint was removed since it was listed, because there are newer checkpoints."""
    try:
        return str(location) not in {str(storage.location(name)) for name in storage.complete()}
    except Exception:  # noqa: BLE001 - a failing storage gives no answer
        return False


def _first(results: Sequence[Sequence[Any]], kind: str) -> str:
    """Return the reason of the first worker with this kind of result, with its rank unless all have it."""
    reasons = {rank: one[1] for rank, one in enumerate(results) if one[0] == kind}
    rank, first = next(iter(reasons.items()))
    return f"rank {rank}: {first}" if len(reasons) < len(results) else str(first)
