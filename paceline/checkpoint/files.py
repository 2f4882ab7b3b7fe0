"""The files of a checkpoint beside its manifest: the tensors, and an index of them for other programs.

They are those of torch.distributed.checkpoint, whose functions can read them. It keeps its index, `.metadata`, as a
pickle, and each tensor as an archive with a pickle inside. Paceline opens neither: the manifest says where the elements
of each tensor begin, and they are read from there as plain bytes.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, BinaryIO, cast

import torch

from paceline.checkpoint.manifest import METADATA, TENSORS, DamagedError, Manifest, dtype_of

Create = Callable[[str], AbstractContextManager[BinaryIO]]
Open = Callable[[str], AbstractContextManager[BinaryIO]]
_CHUNK = 1 << 22
_HEAD = 4096


@dataclass(frozen=True)
class Written:
    """What a manifest says about the files: size and SHA-256 of each, and where each tensor begins."""

    files: dict[str, tuple[int, str]]
    offsets: dict[str, int]


class _Hashed:
    """A file that is written: its size, its hash, and the first bytes since :meth:`mark`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0
        self.head = bytearray()

    def mark(self) -> None:
        self.head.clear()

    def write(self, data: bytes | memoryview) -> int:
        self._file.write(data)
        self._digest.update(data)
        size = memoryview(data).nbytes
        self.size += size
        self.head += memoryview(data).cast("B")[: max(0, _HEAD - len(self.head))]
        return size

    def flush(self) -> None:
        """Do nothing: the file is flushed when it is closed."""

    @property
    def entry(self) -> tuple[int, str]:
        return self.size, self._digest.hexdigest()


def write(create: Create, state: Mapping[str, torch.Tensor]) -> Written:
    """Write named tensors; ``create`` opens a new file by its name."""
    # Here, because importing it takes a good part of the time in which a worker starts.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    offsets: dict[str, int] = {}
    metadata.storage_data = {}
    with create(TENSORS) as file:
        hashed = _Hashed(file)
        for item in plan.items:
            tensor, begin = state[item.index.fqn].detach().cpu().contiguous(), hashed.size
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()  # else the whole storage is saved with it
            hashed.mark()
            torch.save(tensor, cast(IO[bytes], hashed))
            offsets[item.index.fqn] = begin + _start_of_elements(hashed.head, tensor)
            metadata.storage_data[item.index] = _StorageInfo(TENSORS, begin, hashed.size - begin)
        entries = {TENSORS: hashed.entry}
    with create(METADATA) as file:
        hashed = _Hashed(file)
        hashed.write(pickle.dumps(metadata))
        entries[METADATA] = hashed.entry
    return Written(entries, offsets)


def _start_of_elements(head: bytearray, tensor: torch.Tensor) -> int:
    """Where the elements begin in what ``torch.save`` wrote: a zip archive, in which they are the entry ``data/0``."""
    name = head.index(b"/data/0")
    header = head.rindex(b"PK\x03\x04", 0, name)
    start: int = header + 30 + sum(struct.unpack_from("<HH", head, header + 26))
    first: bytes = tensor.reshape(-1).view(torch.uint8)[: _HEAD - start].numpy().tobytes()
    assert head[start : start + len(first)] == first, "this version of torch.save has another layout"
    return start


class _Checked:
    """A file that is read from its beginning to its end: every byte goes into the hash."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._buffer = memoryview(bytearray(_CHUNK))
        self.place = 0

    def skip(self, size: int) -> None:
        """Read bytes that nobody needs."""
        while size > 0:
            part = self._buffer[: min(size, _CHUNK)]
            self.fill(part)
            size -= len(part)

    def fill(self, view: memoryview) -> None:
        """Read bytes into a buffer."""
        while len(view):
            size = self._file.readinto(view[:_CHUNK])  # type: ignore[attr-defined]
            if not size:
                raise DamagedError(f"it ends after {self.place:,} bytes")
            self._digest.update(view[:size])
            self.place += size
            view = view[size:]

    @property
    def hash(self) -> str:
        return self._digest.hexdigest()


def read(open_file: Open, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Read the tensors that a manifest describes; each process reads on its own.

    Args:
        open_file: opens a file by its name.
        manifest: as :func:`paceline.checkpoint.manifest.parse` made it.

    Raises:
        DamagedError: a file has another size or another hash.
    """
    found = {}
    for file_name, (size, expected) in manifest.files.items():
        with open_file(file_name) as file:
            there = file.seek(0, 2)
            if there != size:
                raise DamagedError(f"{file_name} has {there:,} bytes, not {size:,}")
            file.seek(0)
            checked = _Checked(file)
            if file_name == TENSORS:
                for name, offset in sorted(manifest.offsets.items(), key=lambda one: one[1]):
                    dtype, shape = manifest.tensors[name]
                    found[name] = torch.empty(shape, dtype=dtype_of(dtype))
                    checked.skip(offset - checked.place)
                    checked.fill(found[name].reshape(-1).view(torch.uint8).numpy().data)
            checked.skip(size - checked.place)
            if checked.hash != expected:
                raise DamagedError(f"the SHA-256 of {file_name} is not that of the manifest")
    return {name: found[name] for name in manifest.tensors}


def reason_of(error: BaseException) -> str:
    """The root cause of an error, in one line."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return str(error).splitlines()[0] if str(error) else type(error).__name__
