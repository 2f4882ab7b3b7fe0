"""Files of a checkpoint besides the manifest: the tensors, and an index of them for other programs.

The files have the format of torch.distributed.checkpoint, which can read them. That format keeps its index,
`.metadata`, as a pickle, and each tensor as an archive that contains a pickle. Paceline opens neither: the manifest has
the offset of each tensor's elements, which are read as plain bytes.

Every byte is hashed once: elements for the hash of their tensor, which does not depend on the file, and all other bytes
for the hash of the file.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import IO, BinaryIO, cast

import torch

from paceline.checkpoint.manifest import EARLIER, METADATA, DamagedError, Manifest, dtype_of
from paceline.checkpoint.tensors import begin_hash, each, hash_of
from paceline.comm.shm.tensors import bytes_of
from paceline.system.torch_internals import storage_info

Create = Callable[[str], AbstractContextManager[BinaryIO]]
Open = Callable[[str], AbstractContextManager[BinaryIO]]
_CHUNK = 1 << 22
_HEAD = 4096
_TAIL = 1 << 14


@dataclass(frozen=True)
class CheckpointShard:
    """Checkpoint shard: a file with tensors."""

    name: str
    size: int  # size in bytes
    hash: str  # SHA-256 of all bytes that are not elements
    offsets: dict[str, int]  # offset of the elements of each tensor
    hashes: dict[str, str]  # SHA-256 of each tensor, with its dtype and shape
    records: dict[str, tuple[int, int]]  # offset and length of the ``torch.save`` archive of each tensor


class _Recorded:
    """Writable file that records its size, and the first and last bytes since :meth:`mark`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.head = bytearray()
        self.tail = b""

    def mark(self) -> None:
        self.head.clear()
        self.tail = b""

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.size += len(view)
        self.head += view[: max(0, _HEAD - len(self.head))]
        self.tail = (self.tail + bytes(view[-_TAIL:]))[-_TAIL:]
        return len(view)

    def flush(self) -> None:
        """Do nothing. The file is flushed when it is closed."""


def write_part(create: Create, name: str, state: Mapping[str, torch.Tensor], known: dict[str, str]) -> CheckpointShard:
    """Write tensors to a file. ``known``: hashes of tensors that need not be computed. Computed hashes are added."""
    offsets, records, rest = {}, {}, hashlib.sha256()
    with create(name) as file:
        recorded = _Recorded(file)
        for full, value in each(state):
            tensor, begin = value.detach().cpu().contiguous(), recorded.size
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()  # torch.save would write the whole storage
            if full not in known:
                known[full] = hash_of(tensor).hex()
            recorded.mark()
            torch.save(tensor, cast(IO[bytes], recorded))
            start, length = _start_of_elements(recorded.head, tensor), recorded.size - begin
            behind = length - start - tensor.nbytes
            assert behind <= _TAIL, "this version of torch.save has another layout"
            rest.update(recorded.head[:start])
            rest.update(recorded.tail[len(recorded.tail) - behind :])
            offsets[full], records[full] = begin + start, (begin, length)
            del tensor, value  # before the next one arrives
        hashes = {full: known[full] for full in state}
        return CheckpointShard(name, recorded.size, rest.hexdigest(), offsets, hashes, records)


def write_index(
    create: Create, state: Mapping[str, torch.Tensor], parts: Collection[CheckpointShard]
) -> tuple[int, str]:
    """Write the index of torch.distributed.checkpoint. Return its size and hash."""
    # A top-level import would take a large part of a worker's start-up time.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    places = {full: storage_info(part.name, *record) for part in parts for full, record in part.records.items()}
    metadata.storage_data = {item.index: places[item.index.fqn] for item in plan.items}
    text = pickle.dumps(metadata)
    with create(METADATA) as file:
        file.write(text)
    return len(text), hashlib.sha256(text).hexdigest()


def _start_of_elements(head: bytearray, tensor: torch.Tensor) -> int:
    """Return the offset of the elements in a ``torch.save`` archive, a zip file with the elements as ``data/0``."""
    name = head.index(b"/data/0")
    header = head.rindex(b"PK\x03\x04", 0, name)
    start: int = header + 30 + sum(struct.unpack_from("<HH", head, header + 26))
    first: bytes = bytes_of(tensor)[: _HEAD - start].numpy().tobytes()
    assert head[start : start + len(first)] == first, "this version of torch.save has another layout"
    return start


class _Checked:
    """Sequential reader of a file that adds every byte to a hash."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._buffer = memoryview(b"")
        self.place = 0

    def skip(self, size: int) -> None:
        """Read bytes into the hash of the file only."""
        self._buffer = self._buffer or memoryview(bytearray(_CHUNK))
        while size > 0:
            part = self._buffer[: min(size, _CHUNK)]
            self.fill(part, self._digest)
            size -= len(part)

    def jump(self, size: int) -> None:
        """Go past bytes without reading them."""
        self._file.seek(size, 1)
        self.place += size

    def fill(self, view: memoryview, digest: hashlib._Hash | None = None) -> None:
        """Fill a buffer and add its bytes to a hash. Defaults to the hash of the file."""
        digest = digest or self._digest
        while len(view):
            size = self._file.readinto(view[:_CHUNK])  # type: ignore[attr-defined]
            if not size:
                raise DamagedError(f"it ends after {self.place:,} bytes")
            digest.update(view[:size])
            self.place += size
            view = view[size:]

    @property
    def hash(self) -> str:
        return self._digest.hexdigest()


def read(open_file: Open, manifest: Manifest, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Read files that a manifest describes. Return the tensors in them, in the order of the files."""
    found: dict[str, torch.Tensor] = {}
    tensors = manifest.tensors_by_file()
    for file_name in names:
        size, expected = manifest.files[file_name]
        with open_checked(open_file, manifest, file_name) as file:
            checked = _Checked(file)
            for name in tensors.get(file_name, ()):
                checked.skip(manifest.offsets[name] - checked.place)
                found[name] = _read_tensor(checked, manifest, name)
            checked.skip(size - checked.place)
            if checked.hash != expected:
                raise DamagedError(f"the SHA-256 of {file_name} is not that of the manifest")
    return found


def _read_tensor(checked: _Checked, manifest: Manifest, name: str) -> torch.Tensor:
    dtype, shape = manifest.tensors[name]
    tensor = torch.empty(shape, dtype=dtype_of(dtype))
    view = bytes_of(tensor).numpy().data
    if manifest.format == EARLIER:
        checked.fill(view)
        return tensor
    digest = begin_hash(dtype, shape)
    checked.fill(view, digest)
    if digest.hexdigest() != manifest.hashes[name]:
        raise DamagedError(f"the SHA-256 of {name!r} is not that of the manifest")
    return tensor


@contextmanager
def open_checked(open_file: Open, manifest: Manifest, name: str) -> Iterator[BinaryIO]:
    """Open a file of a checkpoint. Raises DamagedError if its size differs from the manifest."""
    size, _ = manifest.files[name]
    with open_file(name) as file:
        there = file.seek(0, 2)
        if there != size:
            raise DamagedError(f"{name} has {there:,} bytes, not {size:,}")
        file.seek(0)
        yield file


def read_at(file: BinaryIO, offset: int, into: torch.Tensor, digest: hashlib._Hash) -> None:
    """Fill a tensor of bytes from an offset of a file, and add the bytes to a hash."""
    file.seek(offset)
    _Checked(file).fill(into.numpy().data, digest)


def check_rest(open_file: Open, manifest: Manifest, name: str) -> None:
    """Check the bytes of a file that are not elements of tensors. Raises DamagedError."""
    size, expected = manifest.files[name]
    with open_checked(open_file, manifest, name) as file:
        checked = _Checked(file)
        for tensor in manifest.tensors_by_file().get(name, ()):
            checked.skip(manifest.offsets[tensor] - checked.place)
            dtype, shape = manifest.kind_of(tensor)
            checked.jump(shape.numel() * dtype.itemsize)
        checked.skip(size - checked.place)
        if checked.hash != expected:
            raise DamagedError(f"the SHA-256 of {name} is not that of the manifest")


def reason_of(error: BaseException) -> str:
    """Return the root cause of an error in one line."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return str(error).splitlines()[0] if str(error) else type(error).__name__
