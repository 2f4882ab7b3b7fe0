"""The tensor files of a checkpoint, through torch.distributed.checkpoint.

Planner and storage are called directly, as ``torch.distributed.checkpoint.save`` calls them in a single process. That
function warns about the single process, and a warning cannot be suppressed in one thread alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

EXTRA = "extra"
"""Name of the tensor that holds the rest of the state, pickled."""


def write(writer: StorageWriter, state: Mapping[str, torch.Tensor]) -> None:
    """Write named tensors from one process."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    written = writer.write_data(plan, planner)
    written.wait()
    writer.finish(metadata, [written.value()])


def read(reader: StorageReader, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read the tensors with these names; each process reads on its own."""
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
    """Pickle a value into a tensor of bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def from_tensor(stored: torch.Tensor) -> Any:
    """Unpickle what :func:`as_tensor` returned."""
    return torch.load(io.BytesIO(stored.numpy().tobytes()), weights_only=False)


def reason_of(error: BaseException) -> str:
    """The root cause of an error, in one line."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return str(error).splitlines()[0] if str(error) else type(error).__name__
