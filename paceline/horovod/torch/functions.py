"""Broadcasts of parameters, optimizer states and objects, and gathering of objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch.optim import Optimizer

from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.runtime import rank
from paceline.horovod.torch.gathering import allgather, broadcast_, broadcast_async_
from paceline.horovod.torch.handles import synchronize
from paceline.system.torch_internals import tree_leaves, tree_map_only


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite tensors with those of the root rank.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``. Values other than
            tensors are ignored.
        root_rank: global rank whose tensors are sent.
        process_set: workers that take part. Defaults to all.

    Raises:
        ValueError: ``params`` has another type.
    """
    if isinstance(params, Mapping):
        params = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | str):
        params = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"broadcast_parameters: give a state_dict or parameters, not a {type(params).__name__}.")
    handles = []
    for name, one in params:
        if isinstance(one, torch.Tensor):
            whole = one.detach()
            given = whole if whole.is_contiguous() else whole.contiguous()
            handles.append((broadcast_async_(given, root_rank, name, process_set), whole, given))
    for handle, whole, given in handles:
        synchronize(handle)
        if given is not whole:
            whole.copy_(given)


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
) -> None:
    """Broadcast the state and the options of the root rank's optimizer, without an optimizer step.

    If the optimizer has no state yet, gradients that are None become zeros.

    Args:
        optimizer: optimizer with the same parameters on all workers.
        root_rank: global rank whose state is sent.
        model: has no effect.
        process_set: workers that take part. Defaults to all.
    """
    if not optimizer.state:
        for group in optimizer.param_groups:
            for one in group["params"]:
                if one.requires_grad and one.grad is None:
                    one.grad = torch.zeros_like(one)
    state = optimizer.state_dict()
    without_tensors = tree_map_only(torch.Tensor, _Hole, state)
    without_tensors = broadcast_object(without_tensors, root_rank, "optimizer state", process_set)
    if rank() != root_rank:
        state = tree_map_only(_Hole, _Hole.filled, without_tensors)
    broadcast_parameters([one for one in tree_leaves(state) if isinstance(one, torch.Tensor)], root_rank, process_set)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


class _Hole:
    """Placeholder of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device.type

    def filled(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of the root rank, which is sent by cloudpickle.

    Example:
        >>> import paceline.horovod.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
        >>> hvd.shutdown()
    """
    name = name or "object"
    data = _bytes(obj) if rank() == root_rank else torch.empty(0, dtype=torch.uint8)
    size = broadcast_(torch.tensor([data.numel()]), root_rank, f"{name}.size", process_set)
    if rank() != root_rank:
        data = torch.empty(int(size), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.data", process_set)
    return obj if rank() == root_rank else cloudpickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all members in the order of ranks. They are sent by cloudpickle."""
    name, data = name or "object", _bytes(obj)
    sizes = allgather(torch.tensor([data.numel()]), f"{name}.sizes", process_set).tolist()
    parts = allgather(data, f"{name}.data", process_set).split(sizes)
    return [cloudpickle.loads(part.numpy().tobytes()) for part in parts]


def _bytes(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
