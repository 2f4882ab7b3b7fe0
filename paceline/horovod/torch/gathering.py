"""Operations that move tensors: ``allgather``, ``broadcast``, ``alltoall``."""

from __future__ import annotations

from typing import Any

import torch

from paceline.horovod.engine.handle import Handle
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.runtime import rank
from paceline.horovod.torch.handles import Tensors, differentiated, like
from paceline.horovod.torch.requests import Average, submit


def _start_gather(tensors: Tensors, name: str | None, process_set: ProcessSet, grouped: bool = False) -> Handle:
    return submit("allgather", tensors, [None] * len(tensors), name, process_set, grouped)


def _gathered(tensors: Tensors, name: str | None, process_set: ProcessSet, grouped: bool = False) -> list[torch.Tensor]:
    """Gather tensors. The gradient is this member's rows of the mean gradient over all members."""
    handles: list[Handle] = []

    def run(given: Tensors) -> Tensors:
        handles.append(_start_gather(given, name, process_set, grouped))
        return handles[0].wait()

    def back(gradients: Tensors) -> Tensors:
        place, found = process_set.ranks.index(rank()), []
        for number, mean in enumerate(_mean(gradients, process_set)):
            rows = [one[number] for one in handles[0].value]
            found.append(mean.narrow(0, sum(rows[:place]), rows[place]))
        return found

    return differentiated(run, back, tensors)


def _mean(tensors: Tensors, process_set: ProcessSet) -> list[torch.Tensor]:
    outputs = [torch.empty_like(one) for one in tensors]
    return submit("allreduce", tensors, outputs, None, process_set, op=str(Average)).wait()


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`allgather` and return a handle for ``poll`` and ``synchronize``."""
    return _start_gather([tensor], name, process_set)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all members along the first dimension, the only one that may differ."""
    return _gathered([tensor], name, process_set)[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`grouped_allgather` and return a handle for ``poll`` and ``synchronize``."""
    return _start_gather(tensors, name, process_set, grouped=True)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gather several tensors as one operation."""
    return _gathered(tensors, name, process_set, grouped=True)


def _start_broadcast(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> Handle:
    return submit("broadcast", [tensor], [output], name, process_set, root=root_rank)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`broadcast` and return a handle for ``poll`` and ``synchronize``."""
    (output,) = like([tensor])
    return _start_broadcast(tensor, output, root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of global rank ``root_rank``. Its gradient is the mean over all members on the root, else 0."""

    def run(given: Tensors) -> Tensors:
        return _start_broadcast(given[0], like(given)[0], root_rank, name, process_set).wait()

    def back(gradients: Tensors) -> Tensors:
        (mean,) = _mean(gradients, process_set)
        return [mean if rank() == root_rank else torch.zeros_like(mean)]

    return differentiated(run, back, [tensor])[0]


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`broadcast_` and return a handle for ``poll`` and ``synchronize``."""
    return _start_broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite a tensor with that of the root rank."""
    _start_broadcast(tensor, tensor, root_rank, name, process_set).wait()
    return tensor


def _start_alltoall(tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Handle:
    members = max(1, len(getattr(process_set, "ranks", ())))  # other objects are refused later
    rows = tensor.shape[0] if isinstance(tensor, torch.Tensor) and tensor.dim() else 0
    wrong = ""
    if splits is None:
        wrong = f"{rows} rows do not divide evenly among {members} members: give splits." if rows % members else ""
        splits = [rows // members] * members
    else:
        splits = torch.as_tensor(splits)
        if splits.dtype.is_floating_point or splits.dtype == torch.bool or splits.dim() != 1:
            wrong = f"splits must be a vector of whole numbers, but have type {splits.dtype}."
        splits = splits.reshape(-1).tolist()
    splits = () if wrong else tuple(map(int, splits))
    return submit("alltoall", [tensor], [None, None], name, process_set, wrong=wrong, splits=splits)


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`alltoall`. Results are always the rows and the number of rows from each member."""
    return _start_alltoall(tensor, splits, name, process_set)


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send each member its rows, and receive this member's rows from all members.

    Args:
        tensor: tensor to divide along its first dimension.
        splits: number of rows for each member. Defaults to the same number for each.
        name, process_set: name of the operation, and the workers that take part.

    Returns:
        the received rows. If ``splits`` is given, a pair of them and the number of rows from each member.
    """
    received: list[list[int]] = []

    def run(given: Tensors) -> Tensors:
        found = _start_alltoall(given[0], splits, name, process_set).wait()
        received.append(found[1].tolist())
        return found

    def back(gradients: Tensors) -> Tensors:
        return _start_alltoall(gradients[0], received[0], None, process_set).wait()[:1]

    rows, counts = differentiated(run, back, [tensor])
    return rows if splits is None else (rows, counts)
