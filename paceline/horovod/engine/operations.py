"""Tensor operations over the process group of a process set. GPU tensors go through the host.

All members of the set call the operations in the same order, each on a single thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from paceline.horovod.engine.adasum import adasum
from paceline.horovod.engine.negotiation import Item
from paceline.horovod.engine.requests import Request

REDUCTIONS = {
    "Average": dist.ReduceOp.SUM,
    "Sum": dist.ReduceOp.SUM,
    "Min": dist.ReduceOp.MIN,
    "Max": dist.ReduceOp.MAX,
    "Product": dist.ReduceOp.PRODUCT,
}
_WIDER = {torch.int16: torch.int32, torch.bool: torch.uint8}  # wider types for dtypes that gloo cannot reduce


class Members(NamedTuple):
    """Members of a process set."""

    ranks: tuple[int, ...]  # ranks of all members, in ascending order
    place: int  # index of this worker in ``ranks``, or -1 if it is not a member
    # torch process group. None if there is only one member or this worker is not a member.
    group: dist.ProcessGroup | None


class Task(NamedTuple):
    """Tensors and results of an operation on this worker."""

    tensors: list[torch.Tensor]
    outputs: list[torch.Tensor | None]  # output tensors, filled with the results. None is replaced by a new tensor.


def open_group(ranks: tuple[int, ...], rank: int, seconds: float) -> dist.ProcessGroup | None:
    """Create a torch process group of some ranks. All workers must call this in the same order."""
    if len(ranks) == 1 and not dist.is_initialized():
        return None
    group = dist.distributed_c10d.new_group(list(ranks), timeout=timedelta(seconds=seconds), backend="gloo")
    return group if rank in ranks and len(ranks) > 1 else None


def start_all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor, op: str = "Sum") -> dist.Work:
    """Start an in-place all-reduce that is not recorded as a call of the script."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(REDUCTIONS[op])
    return group.allreduce([tensor], options)


def allreduce(members: Members, items: Sequence[Item], tasks: Sequence[Task | None]) -> None:
    """Reduce the tensors of several tasks at once. If a task is None, this worker has joined and sends zeros."""
    first = items[0].request
    dtypes = {getattr(torch, name) for item in items for name in item.request.dtypes}
    for dtype in sorted(dtypes, key=str):
        parts, slots = _parts(items, tasks, dtype)
        flat = torch.cat(parts)
        reduced = _reduce(members, flat, first)
        offset = 0
        for size, task, place in slots:
            if task is not None:
                _put(task, place, reduced[offset : offset + size].view(task.tensors[place].shape))
            offset += size


def _parts(
    items: Sequence[Item], tasks: Sequence[Task | None], dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[tuple[int, Task | None, int]]]:
    parts, slots = [], []
    for item, task in zip(items, tasks, strict=True):
        for place, (name, shape) in enumerate(zip(item.request.dtypes, item.request.shapes, strict=True)):
            if getattr(torch, name) == dtype:
                given = None if task is None else task.tensors[place].detach().reshape(-1).cpu()
                parts.append(torch.zeros(shape, dtype=dtype).reshape(-1) if given is None else given)
                slots.append((parts[-1].numel(), task, place))
    return parts, slots


def _reduce(members: Members, flat: torch.Tensor, request: Request) -> torch.Tensor:
    """Return a vector reduced over the members. The given vector may be changed."""
    flat = _scaled(flat, request.prescale)
    if request.op == "Adasum":
        return _scaled(adasum(_gather(members, flat, [flat.numel()] * len(members.ranks))), request.postscale)
    if members.group is not None:
        wide = flat.to(_WIDER.get(flat.dtype, flat.dtype))
        start_all_reduce(members.group, wide, request.op).wait()
        flat = wide.to(flat.dtype)
    flat = _scaled(flat, request.postscale)
    if request.op != "Average" or len(members.ranks) == 1:
        return flat
    if flat.dtype.is_floating_point:
        return flat.div_(len(members.ranks))
    return flat.div_(len(members.ranks), rounding_mode="trunc")


def _scaled(flat: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a vector times a factor. Integers are multiplied in float64 and truncated toward zero."""
    if factor == 1.0:
        return flat
    if flat.dtype.is_floating_point:
        return flat * factor
    return (flat.double() * factor).to(flat.dtype)


def allgather(members: Members, item: Item, task: Task) -> None:
    """Concatenate the tensors of all members along the first dimension."""
    for place, tensor in enumerate(task.tensors):
        rows = [one[place] for one in item.rows]
        given = tensor.detach().cpu()
        row = given.new_empty((1, *given.shape[1:])).numel()
        parts = _gather(members, given.reshape(-1), [count * row for count in rows])
        _put(task, place, torch.cat(parts).view(sum(rows), *given.shape[1:]))


def _gather(members: Members, flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the vectors of all members, by an all-gather if their lengths are equal, otherwise by broadcasts."""
    if members.group is None:
        return [flat]
    parts = [torch.empty(size, dtype=flat.dtype) for size in sizes]
    parts[members.place].copy_(flat)
    if len(set(sizes)) == 1 and sizes[0]:
        members.group.allgather([[_bytes(part) for part in parts]], [_bytes(flat)]).wait()
        return parts
    works = [_start_broadcast(members.group, part, place) for place, part in enumerate(parts) if part.numel()]
    for work in works:
        work.wait()
    return parts


def _start_broadcast(group: dist.ProcessGroup, flat: torch.Tensor, place: int) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = place, 0
    return group.broadcast([_bytes(flat)], options)


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    """View a vector as bytes because gloo does not support all dtypes."""
    return flat.view(torch.uint8)


def broadcast(members: Members, item: Item, task: Task) -> None:
    for place, tensor in enumerate(task.tensors):
        flat = tensor.detach().cpu().reshape(-1).clone()
        if members.group is not None and flat.numel():
            _start_broadcast(members.group, flat, members.ranks.index(item.request.root)).wait()
        _put(task, place, flat.view(tensor.shape))


def alltoall(members: Members, item: Item, task: Task) -> None:
    """Send each member its rows. The second result is the number of rows received from each member."""
    (tensor,) = task.tensors
    received = [splits[members.place] for splits in item.rows]
    given = tensor.detach().cpu()
    rest = given.shape[1:]
    row = given.new_empty((1, *rest)).numel()
    flat = torch.empty(sum(received) * row, dtype=given.dtype)
    if members.group is None:
        flat.copy_(given[: received[0]].reshape(-1))
    else:
        width = row * given.element_size()
        sent = item.rows[members.place]
        members.group.alltoall_base(
            _bytes(flat),
            _bytes(given[: sum(sent)].reshape(-1)),
            [count * width for count in received],
            [count * width for count in sent],
            dist.AllToAllOptions(),
        ).wait()
    _put(task, 0, flat.view(sum(received), *rest))
    task.outputs[1] = torch.tensor(received, dtype=torch.int32)


def reducescatter(members: Members, item: Item, task: Task) -> None:
    """Reduce tensors and keep this member's rows. If rows do not divide evenly, the first members keep one row more."""
    for place, tensor in enumerate(task.tensors):
        reduced = _reduce(members, tensor.detach().cpu().reshape(-1).clone(), item.request).view(tensor.shape)
        each, more = divmod(tensor.shape[0], len(members.ranks))
        first = members.place * each + min(members.place, more)
        _put(task, place, reduced[first : first + each + (members.place < more)].clone())


def barrier(members: Members, item: Item, task: Task) -> None:
    """Do nothing, because a barrier has ended once all members have requested it."""


def _put(task: Task, place: int, result: torch.Tensor) -> None:
    if (output := task.outputs[place]) is None:
        task.outputs[place] = result.to(task.tensors[place].device)
    else:
        output.detach().copy_(result)
