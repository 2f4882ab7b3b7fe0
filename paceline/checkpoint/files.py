"""The files of tensors, through torch.distributed.checkpoint.

The planner and the storage are called one by one, as ``torch.distributed.checkpoint.save`` does in a single process:
that function itself warns of the single process, and a warning cannot be held back in one thread alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

EXTRA = "extra"
"""The name under which everything that is no tensor is stored, as bytes."""


def write(writer: StorageWriter, state: Mapping[str, torch.Tensor]) -> None:
    """Write tensors by name; one process does."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    written = writer.write_data(plan, planner)
    written.wait()
    writer.finish(metadata, [written.value()])


def read(reader: StorageReader, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors of these names; every process reads for itself."""
    metadata = reader.read_metadata()
    known = metadata.state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(known[name].size, dtype=known[name].properties.dtype)  # type: ignore[union-attr]
        for name in names
    }
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(reader.prepare_global_plan(plans)[0])
    reader.read_data(plan, planner).wait()
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
    """The first cause of an error, in one line."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return str(error).splitlines()[0] if str(error) else type(error).__name__
