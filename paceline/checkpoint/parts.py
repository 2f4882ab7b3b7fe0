"""Each rank writes a part of a checkpoint, and describes it; rank 0 collects the descriptions for the manifest.

::

    rank 0    begin ─ part 0 ────── index, manifest, rename
    rank 1          └ part 1, its description ┘
    rank 2          └ part 2, its description ┘

They meet in the directory of the unfinished checkpoint and nowhere else, so no message is sent, and training goes on.
Rank 0 has all tensors. What another rank does not write in time, rank 0 writes itself: a rank that was lost, that has
just joined, or that has another disk under the same path costs time, and no checkpoint.
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
from paceline.checkpoint.files import Part
from paceline.checkpoint.manifest import TENSORS, step_of
from paceline.checkpoint.storage.base import Storage, Writer
from paceline.system import fault_points

_log = logging.getLogger("paceline")
LEAST_BYTES = 1 << 22
"""Of a part: below that, to begin a file costs more than to write it."""
BEGIN_SECONDS = 10.0
"""For so long the other ranks wait for rank 0 to begin."""
_POLL_SECONDS, _LONGEST_PAUSE = 0.01, 0.1
_LARGEST = 1 << 28
_SEAL = 64
_PART = TypeAdapter(Part)


@dataclass(frozen=True)
class Save:
    """One save, as all ranks know it.

    Attributes:
        storage: of the run.
        step: the name of the step.
        key: authenticates the descriptions, if there is one.
        over: whether the workers have changed since, so that nobody is to be waited for.
        absent: ranks whose part did not come in an earlier save of the same workers: they are not waited for.
    """

    storage: Storage
    step: str
    key: bytes | None
    over: Callable[[], bool]
    absent: set[int] = field(default_factory=set)


def divide(tensors: Mapping[str, torch.Tensor], workers: int) -> list[list[str]]:
    """Assign each tensor to a rank: the largest first, to the rank that has the fewest bytes.

    Args:
        tensors: of the state by name.
        workers: how many there are.

    Returns:
        the names of each part; the first is rank 0's. There are at most ``workers``, and fewer of a small state.

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


def write(save: Save, writer: tuple[int, int], number: int, tensors: Mapping[str, torch.Tensor]) -> Part | None:
    """Write a part for rank 0, once that has begun.

    Args:
        save: which.
        writer: launch and generation of rank 0, and of this worker.
        number: of the part.
        tensors: in it.

    Returns:
        the part; none if rank 0 did not begin, or the workers have changed.
    """
    deadline, pause = time.monotonic() + BEGIN_SECONDS, _POLL_SECONDS
    while (begun := save.storage.begun(save.step, *writer)) is None:
        if save.over() or time.monotonic() > deadline or save.storage.complete_in(save.step):
            return None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    create = partial(save.storage.create, save.step, begun)
    part = files.write_part(create, f"__{number}_0.distcp", tensors, {})
    fault_points.reach("writing a part", step_of(save.step))
    with create(_description(number)) as file:
        file.write(_sealed(save, begun, json.dumps(asdict(part)).encode()))
    return part


def collect(save: Save, writer: Writer, number: int, names: list[str], deadline: float) -> Part | None:
    """Wait for the description of a part; none if it does not come until ``deadline`` (of ``time.monotonic``)."""
    while True:
        part = _read(save, writer, number)
        if part is not None and part.name == f"__{number}_0.distcp" and set(part.offsets) == set(names):
            return part
        if save.over() or time.monotonic() > deadline:
            return None
        time.sleep(_POLL_SECONDS)


def write_all(save: Save, writer: Writer, tensors: Mapping[str, torch.Tensor], known: dict[str, str],
              workers: int) -> list[Part]:  # fmt: skip
    """Write part 0, collect the others, and write those that do not come; rank 0 does that."""
    mine, *others = divide(tensors, workers)
    create = partial(save.storage.create, save.step, writer)
    begin = time.monotonic()
    parts = [files.write_part(create, TENSORS, {name: tensors[name] for name in mine}, known)]
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
    """The text behind its HMAC, which is of this save only; without a key it still shows whether all is there."""
    about = f"{save.step} {writer} ".encode()
    return hmac.digest(save.key or b"none", about + text, "sha256").hex().encode() + text


def _read(save: Save, writer: Writer, number: int) -> Part | None:
    """The part that a rank describes; none if there is no whole description yet."""
    found = save.storage.read_begun(save.step, writer, _description(number), _LARGEST)
    if found is None or not hmac.compare_digest(_sealed(save, writer, found[_SEAL:]), found):
        return None
    try:
        return _PART.validate_json(found[_SEAL:])
    except ValidationError:
        return None
