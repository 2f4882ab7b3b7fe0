"""The files of tensors, through torch.distributed.checkpoint."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

EXTRA = "extra"
"""The name under which everything that is no tensor is stored, as bytes."""


def write(directory: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write tensors by name into a directory; one process does."""
    with _alone():
        save(dict(state), checkpoint_id=directory, no_dist=True)


def read(directory: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """The tensors of these names; every process reads for itself."""
    known = FileSystemReader(directory).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(known[name].size, dtype=known[name].properties.dtype)  # type: ignore[union-attr]
        for name in names
    }
    with _alone():
        load(state, checkpoint_id=directory, no_dist=True)
    return state


def as_tensor(value: Any) -> torch.Tensor:
    """Anything that can be pickled, as bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def from_tensor(stored: torch.Tensor) -> Any:
    """The value that :func:`as_tensor` was given."""
    return torch.load(io.BytesIO(stored.numpy().tobytes()), weights_only=False)


def reason_of(error: BaseException) -> str:
    """The first cause of an error of torch, in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@contextmanager
def _alone() -> Iterator[None]:
    """Without the warning that a single process reads and writes, which is what is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        yield
