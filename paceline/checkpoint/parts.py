"""Sharded write of a checkpoint: each rank writes a shard and its description, and rank 0 collects both.

::

    rank 0    begin ─ part 0 ────── index, manifest, rename
    rank 1          └ part 1, its description ┘
    rank 2          └ part 2, its description ┘

Ranks communicate only through the directory of the unfinished checkpoint, without messages, so training continues.
Rank 0 has all tensors, and writes each shard that another rank does not write in time. So a rank that was lost, has
just joined, or has another disk under the same path costs time but no checkpoint.
"""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from pydantic import TypeAdapter, ValidationError

from paceline.checkpoint import files
from paceline.checkpoint.files import CheckpointShard
from paceline.checkpoint.manifest import TENSORS, step_of
from paceline.checkpoint.storage.base import Storage, Writer
from paceline.checkpoint.tensors import in_order
from paceline.system import fault_points

_log = logging.getLogger("paceline")
LEAST_BYTES = 1 << 22  # Minimum bytes per shard. For smaller shards, creating a file takes longer than writing it.
BEGIN_SECONDS = 10.0  # timeout in seconds of the other ranks for rank 0 to begin a save
_POLL_SECONDS, _LONGEST_PAUSE = 0.01, 0.1
_LARGEST = 1 << 28
_SEAL = 64
_PART = TypeAdapter(CheckpointShard)


@dataclass(frozen=True)
class Save:
    """Description of a save, shared by all ranks."""

    storage: Storage
    step: str
    key: bytes | None  # key that authenticates the descriptions of shards, or None
    # function that returns whether the membership has changed or is about to change, which ends all waits
    over: Callable[[], bool]
    # ranks whose shard was missing in an earlier save of the same membership. Rank 0 does not wait for them.
    absent: set[int] = field(default_factory=set)


def divide(tensors: Mapping[str, torch.Tensor], workers: int) -> list[list[str]]:
    """Assign tensors to ranks in order of size, largest first, each to the rank with the fewest bytes.

    Returns:
        tensor names of each shard, at most ``workers`` shards, and fewer for a small state. Rank 0 writes the first.

    >>> divide({name: torch.empty(rows, 1 << 20) for name, rows in (("a", 3), ("b", 2), ("c", 2))}, 2)
    [['a'], ['b', 'c']]
    """
    sizes = {name: value.numel() * value.element_size() for name, value in tensors.items()}
    count = max(1, min(workers, sum(sizes.values()) // LEAST_BYTES))
    parts: list[list[str]] = [[] for _ in range(count)]
    bytes_of = [0] * count
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):
        least = bytes_of.index(min(bytes_of))
        parts[least].append(name)
        bytes_of[least] += sizes[name]
    return parts[:1] + [part for part in parts[1:] if part]


def write(
    save: Save, writer: tuple[int, int], number: int, tensors: Mapping[str, torch.Tensor]
) -> CheckpointShard | None:
    """Write a shard and its description once rank 0 has begun the save.

    Args:
        writer: launch and generation, which rank 0 and this worker share.

    Returns:
        the shard, or None if rank 0 did not begin in time or has finished, or the membership has changed.
    """
    deadline, pause = time.monotonic() + BEGIN_SECONDS, _POLL_SECONDS
    while (begun := save.storage.begun(save.step, *writer)) is None:
        if save.over() or time.monotonic() > deadline or save.storage.complete_in(save.step):
            return None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    create = partial(save.storage.create_part, save.step, begun)
    part = files.write_part(create, f"__{number}_0.distcp", tensors, {})
    fault_points.reach("writing a part", step_of(save.step))
    with create(_description(number)) as file:
        file.write(_sealed(save, begun, json.dumps(asdict(part)).encode()))
    return part


def collect(save: Save, writer: Writer, number: int, names: list[str], deadline: float) -> CheckpointShard | None:
    """Wait for a shard and its description. Return None after ``deadline`` (of ``time.monotonic``)."""
    while True:
        part = _read(save, writer, number)
        if part is not None and part.name == f"__{number}_0.distcp" and set(part.offsets) == set(names):
            return part
        if save.over() or time.monotonic() > deadline:
            return None
        time.sleep(_POLL_SECONDS)


def write_all(save: Save, writer: Writer, tensors: Mapping[str, torch.Tensor], known: dict[str, str],
              workers: int) -> list[CheckpointShard]:  # fmt: skip
    """Write shard 0, collect the other shards, and write those that are missing. Rank 0 calls this."""
    mine, *others = divide(tensors, workers)
    create = partial(save.storage.create, save.step, writer)
    begin = time.monotonic()
    parts = [files.write_part(create, TENSORS, in_order(tensors, mine), known)]
    deadline = time.monotonic() + max(1.0, 2 * (time.monotonic() - begin))
    for number, names in enumerate(others, 1):
        part = collect(save, writer, number, names, 0.0 if number in save.absent else deadline)
        if part is None:
            save.absent.add(number)
            _log.info("rank %d did not write its part of %s: rank 0 writes it", number, save.step)
            part = files.write_part(create, f"__{number}_1.distcp", {name: tensors[name] for name in names}, known)
        else:
            save.absent.discard(number)
        parts.append(part)
    return parts


def _description(number: int) -> str:
    return f".part-{number}"


def _sealed(save: Save, writer: Writer, text: bytes) -> bytes:
    """Prefix a text with an HMAC that is valid for this save only. Without a key it only detects truncation."""
    about = f"{save.step} {writer} ".encode()
    return hmac.digest(save.key or b"none", about + text, "sha256").hex().encode() + text


def _read(save: Save, writer: Writer, number: int) -> CheckpointShard | None:
    """Read the description of a shard. Return None if it is not complete yet or not authentic."""
    found = save.storage.read_part(save.step, writer, _description(number), _LARGEST)
    if found is None or not hmac.compare_digest(_sealed(save, writer, found[_SEAL:]), found):
        return None
    try:
        part = _PART.validate_json(found[_SEAL:])
    except ValidationError:
        return None
    # The shard is missing if rank 0 began the save again, after an error, before the rank wrote the description.
    return part if save.storage.read_part(save.step, writer, part.name, 0) is not None else None
