"""Checkpoint reads by any number of workers. Each worker gets the whole checkpoint or a share.

::

    worker 0   reads a[0:k]  a[k:]   ...      adds each chunk to the hash of its tensor,
    worker 1   reads b       c, d    ...      and sends the elements that other workers need
               round 1       round 2

A round reads at most ``CHUNK_BYTES`` on each worker, so a worker holds at most its share and the chunks of one round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from paceline.checkpoint import encoding, files
from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.manifest import DamagedError, Manifest
from paceline.checkpoint.storage import locations
from paceline.checkpoint.storage.retry import is_storage_error
from paceline.checkpoint.tensors import begin_hash
from paceline.comm.transport.base import Message
from paceline.comm.world import World
from paceline.errors import CheckpointError
from paceline.schedule.slices import slice_name

CHUNK_BYTES = 1 << 23  # maximum bytes that a worker reads in a round, unless a single block of a tensor is larger
_BLOCK = 64
_TAG = (1 << 26) - 2


class MissingError(CheckpointError):
    """Raised if a file of a checkpoint does not exist, because it is not visible yet or was removed."""


@dataclass(frozen=True)
class Content:
    """Checkpoint in memory: manifest and tensors by name, either all tensors or those in the files of a reader."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reader:
    """Reader ``number`` of the ``of`` workers that divide the files of a checkpoint. Defaults to reading all."""

    number: int = 0
    of: int = 1

    def files_of(self, manifest: Manifest) -> list[str]:
        """Return every ``of``-th file. Files have similar sizes, because their writers divided the state evenly."""
        return sorted(manifest.files)[self.number :: self.of]


class Shares(Protocol):
    """Division of a state among the workers."""

    hashes: Mapping[str, str] | None  # hash of each tensor of the optimizer's state. None if they are not known

    def parts_of(self, name: str, shape: torch.Size, rank: int) -> list[slice]:
        """Return the parts of a flattened tensor that a worker needs: none, all elements, or slices."""

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load this worker's parts by name (``schedule.slices``), or whole tensors, and remove them from ``tensors``.

        All workers call this together. After :meth:`move`, ``tensors`` need not hold parameters or optimizer state,
        and no worker waits for another one.
        """

    def move(self, owned: frozenset[str] | None, what: str) -> None:
        """Send each worker its new share, which :meth:`load` then loads. This worker keeps its present values.

        All workers call this together.

        Args:
            owned: parameters and slices of parameters whose newest values and state this worker has. None means all.
            what: purpose, for errors.

        Raises:
            WorkerLost: a worker was lost.
        """


class Chunk(NamedTuple):
    """Elements of a flattened tensor that are read at once."""

    name: str
    start: int
    stop: int


def plan(manifest: Manifest, workers: int) -> list[list[list[Chunk]]]:
    """Return the chunks that each worker reads in each round. A worker reads all chunks of a tensor, in order."""
    loads, names = [0] * workers, [list[str]() for _ in range(workers)]
    sizes = {name: _bytes_of(manifest, name) for name in manifest.tensors}
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):
        reader = loads.index(min(loads))
        names[reader].append(name)
        loads[reader] += max(1, sizes[name])
    return [[*_rounds(manifest, sorted(own, key=lambda one: _place_of(manifest, one)))] for own in names]


def _rounds(manifest: Manifest, names: Sequence[str]) -> Iterator[list[Chunk]]:
    group: list[Chunk] = []
    room = 0
    for name in names:
        dtype, shape = manifest.kind_of(name)
        step = max(_BLOCK, CHUNK_BYTES // dtype.itemsize // _BLOCK * _BLOCK)
        for start in range(0, max(1, shape.numel()), step):
            stop = min(start + step, shape.numel())
            size = (stop - start) * dtype.itemsize
            if group and room + size > CHUNK_BYTES:
                yield group
                group, room = [], 0
            group.append(Chunk(name, start, stop))
            room += size
    if group:
        yield group


def _bytes_of(manifest: Manifest, name: str) -> int:
    dtype, shape = manifest.kind_of(name)
    return shape.numel() * dtype.itemsize


def _place_of(manifest: Manifest, name: str) -> tuple[str, int]:
    return manifest.part_of(name), manifest.offsets[name]


class SharedRead:
    """Read of a checkpoint in shares. In each round, all workers call :meth:`read`, then :meth:`exchange`.

    Attributes:
        tensors: this worker's parts by name (``schedule.slices``), complete after the last round.
    """

    def __init__(self, world: World, manifest: Manifest, open_file: files.Open, shares: Shares) -> None:
        self._world, self._manifest, self._open, self._shares = world, manifest, open_file, shares
        self._plan = plan(manifest, world.size)
        self.rounds = max(map(len, self._plan))
        self._digests: dict[str, hashlib._Hash] = {}
        self._chunks: dict[Chunk, torch.Tensor] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._flat: dict[str, list[tuple[slice, torch.Tensor]]] = {}
        for name in manifest.tensors:
            dtype, shape = manifest.kind_of(name)
            for part in shares.parts_of(name, shape, world.rank):
                whole = part.stop - part.start == shape.numel()
                value = torch.empty(shape if whole else part.stop - part.start, dtype=dtype)
                self.tensors[name if whole else slice_name(name, part.start, part.stop)] = value
                self._flat.setdefault(name, []).append((part, value.view(-1).view(torch.uint8)))

    def read(self, number: int) -> None:
        """Read this worker's chunks of a round. May be repeated if the storage fails."""
        manifest = self._manifest
        digests: dict[str, hashlib._Hash] = {}
        self._chunks = {}
        with ExitStack() as stack:
            opened = {}
            for chunk in self._chunks_of(self._world.rank, number):
                dtype, shape = manifest.kind_of(chunk.name)
                file_name, offset = _place_of(manifest, chunk.name)
                if file_name not in opened:
                    opened[file_name] = stack.enter_context(files.open_checked(self._open, manifest, file_name))
                value = torch.empty((chunk.stop - chunk.start) * dtype.itemsize, dtype=torch.uint8)
                before = self._digests.get(chunk.name) if chunk.name not in digests else digests[chunk.name]
                digest = begin_hash(manifest.tensors[chunk.name][0], shape) if before is None else before.copy()
                files.read_at(opened[file_name], offset + chunk.start * dtype.itemsize, value, digest)
                digests[chunk.name], self._chunks[chunk] = digest, value
                if chunk.stop == shape.numel() and digest.hexdigest() != manifest.hashes[chunk.name]:
                    raise DamagedError(f"the SHA-256 of {chunk.name!r} is not that of the manifest")
        self._digests = digests

    def exchange(self, number: int) -> None:
        """Exchange the chunks of this round with the workers that need elements of them.

        Raises:
            WorkerLost: a worker was lost.
        """
        world, rank = self._world, self._world.rank
        for chunk, part, target in self._needed(rank, number):
            _bytes(target, part, chunk, self._itemsize(chunk)).copy_(self._piece(chunk, part))
        world.await_process_group()
        sends, receives = [], []
        sent: dict[tuple[tuple[Chunk, int, int], ...], torch.Tensor] = {}  # peers may need the same pieces
        for peer in world.others:
            wanted = [
                (chunk, part)
                for chunk in self._chunks
                for part in self._shares.parts_of(chunk.name, self._manifest.kind_of(chunk.name)[1], peer)
                if _overlaps(chunk, part)
            ]
            if wanted:
                key = tuple((chunk, *_overlap(chunk, part)) for chunk, part in wanted)
                if key not in sent:
                    sent[key] = torch.cat([self._piece(chunk, part) for chunk, part in wanted])
                sends.append(Message(sent[key], peer, _TAG))
            coming = [
                _bytes(target, part, chunk, self._itemsize(chunk)) for chunk, part, target in self._needed(peer, number)
            ]
            if coming:
                flat = torch.empty(sum(map(len, coming)), dtype=torch.uint8)
                receives.append((Message(flat, peer, _TAG), coming))
        started = world.start_transfers(sends, [one for one, _ in receives], "while the workers read it", host=True)
        for transfer in started:
            transfer.wait()
        for message, coming in receives:
            for target, piece in zip(coming, message.tensor.split([*map(len, coming)]), strict=True):
                target.copy_(piece)
        self._chunks = {}

    def check_files(self) -> None:
        """Check the bytes outside of tensors. Each worker checks its share of the files. Raises DamagedError."""
        for name in sorted(self._manifest.files)[self._world.rank :: self._world.size]:
            files.check_rest(self._open, self._manifest, name)

    def _chunks_of(self, reader: int, number: int) -> list[Chunk]:
        return self._plan[reader][number] if number < len(self._plan[reader]) else []

    def _needed(self, reader: int, number: int) -> list[tuple[Chunk, slice, torch.Tensor]]:
        """Return the chunks that hold elements for this worker, each with the part they belong to and its memory."""
        return [
            (chunk, part, target)
            for chunk in self._chunks_of(reader, number)
            for part, target in self._flat.get(chunk.name, ())
            if _overlaps(chunk, part)
        ]

    def _piece(self, chunk: Chunk, part: slice) -> torch.Tensor:
        """Return the bytes of a chunk that belong to a part of its tensor."""
        size, (first, last) = self._itemsize(chunk), _overlap(chunk, part)
        return self._chunks[chunk][(first - chunk.start) * size : (last - chunk.start) * size]

    def _itemsize(self, chunk: Chunk) -> int:
        return self._manifest.kind_of(chunk.name)[0].itemsize


def _overlap(chunk: Chunk, part: slice) -> tuple[int, int]:
    return max(chunk.start, part.start), min(chunk.stop, part.stop)


def _overlaps(chunk: Chunk, part: slice) -> bool:
    first, last = _overlap(chunk, part)
    return first < last


def _bytes(target: torch.Tensor, part: slice, chunk: Chunk, size: int) -> torch.Tensor:
    """Return the bytes of a part that a chunk fills."""
    first, last = _overlap(chunk, part)
    return target[(first - part.start) * size : (last - part.start) * size]


def find(resume: str) -> Path | str:
    """Return the location of the checkpoint that ``resume`` names, or of the newest checkpoint in that folder."""
    named = locations.storage_at(resume)
    parent, step = locations.split(resume)
    if manifests.step_of(step) >= 0:
        storage = locations.storage_at(parent)
        return storage.location(next(iter(storage.complete_in(step)), step))
    return named.location(next(iter(named.complete()), ""))


def read(location: Path | str, check: Callable[[Path | str, Manifest], None], reader: Reader | None = None) -> Content:
    """Read a checkpoint, or the files of one reader.

    Args:
        check: function that is called with location and manifest before the tensors are read, and may raise.
        reader: reader whose files to read. Defaults to all files.

    Raises:
        DamagedError: the content is not what was written.
        MissingError: a file does not exist.
        CheckpointError: ``check`` refused the checkpoint.
        OSError, or an error of the store's client: the storage failed.
    """
    manifest = read_checked(location, check)
    open_file = _open_in(location)
    with _explained(location):
        tensors = files.read(open_file, manifest, (reader or Reader()).files_of(manifest))
    return Content(manifest, tensors)


def read_checked(location: Path | str, check: Callable[[Path | str, Manifest], None]) -> Manifest:
    """Read and check the manifest of a checkpoint. Raises as :func:`read` does."""
    manifest = read_manifest(location)
    check(location, manifest)
    return manifest


def read_shares(world: World, location: Path | str, manifest: Manifest, shares: Shares) -> SharedRead:
    """Return a read of a checkpoint in which each worker gets its share."""
    return SharedRead(world, manifest, _open_in(location), shares)


def read_part(location: Path | str, reading: SharedRead, number: int | None) -> None:
    """Read this worker's chunks of a round, or check the files if ``number`` is None. Raises as :func:`read` does."""
    with _explained(location):
        if number is None:
            reading.check_files()
        else:
            reading.read(number)


def _open_in(location: Path | str) -> files.Open:
    parent, name = locations.split(location)
    return partial(locations.storage_at(parent).open, name)


@contextmanager
def _explained(location: Path | str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise MissingError(f"{location} is not complete: a file is not there: {files.reason_of(error)}.") from error
    except Exception as error:
        if is_storage_error(error):
            raise
        raise DamagedError(f"{location} is damaged and cannot be read: {files.reason_of(error)}.") from error


def read_manifest(location: Path | str) -> Manifest:
    """Read the manifest of a checkpoint. Raises as :func:`read` does."""
    parent, name = locations.split(location)
    try:
        text = locations.storage_at(parent).manifest(name)
    except FileNotFoundError as error:
        raise MissingError(
            f"{location} is not a complete checkpoint: it has no {manifests.FILE}. Give the path of a "
            f"checkpoint, as runs/<name>/checkpoints/step-000100, or 'auto' for the newest."
        ) from error
    except Exception as error:
        if is_storage_error(error):
            raise
        reason = files.reason_of(error)
        raise DamagedError(f"{location} is damaged: {manifests.FILE}: {reason}.") from error
    manifest = manifests.parse(text, f"{location}/{manifests.FILE}")
    if manifests.step_of(name.partition("/")[0]) not in (-1, manifest.step):
        raise DamagedError(f"{location} is damaged: its manifest is that of step {manifest.step}.")
    return manifest


def check_model(manifest: Manifest, model: nn.Module, where: Path | str) -> None:
    """Raise CheckpointError if a checkpoint is of another model."""
    here: dict[str, torch.Tensor] = {f"parameter/{name}": value for name, value in model.named_parameters()}
    here.update({f"buffer/{name}": value for name, value in model.named_buffers()})
    saved = {name: entry for name, entry in manifest.tensors.items() if name.startswith(("parameter/", "buffer/"))}
    for name, tensor in here.items():
        if name not in saved:
            raise CheckpointError(f"{where} is of another model: it has no {_quoted(name)}.")
        kind = str(tensor.dtype), list(tensor.shape)
        if saved[name] != kind:
            raise CheckpointError(
                f"{where} is of another model: its {_quoted(name)} is {saved[name][0]} {saved[name][1]}, "
                f"the model's is {kind[0]} {kind[1]}."
            )
    for name in saved:
        if name not in here:
            raise CheckpointError(f"{where} is of another model: the model has no {_quoted(name)}.")


def _quoted(name: str) -> str:
    kind, _, rest = name.partition("/")
    return f"{kind} {rest!r}"


def described(rest: dict[str, Any]) -> dict[str, object]:
    """Return the parts of an optimizer step's saved state that must match on resume, as text for messages."""
    if any("params" in group or not all(isinstance(key, str) for key in group) for group in rest["groups"]):
        raise encoding.EncodingError("its parameter groups are not those of an optimizer")
    if not isinstance(rest["run"], str) or not isinstance(rest["strategy_state"], dict):
        raise encoding.EncodingError("it is not the state of a run")
    return {
        "the optimizer": rest["optimizer"],
        "the number of its groups": len(rest["groups"]),
        "a schedule": "none" if rest["schedule"] is None else "given",
    }
