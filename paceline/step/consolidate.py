"""Consolidation of a training state that is divided among the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.checkpoint.tensors import check_savable, load_optimizer_state, named_tensors
from paceline.comm.shm.tensors import Kinds, kinds_of, room_of, views_of
from paceline.comm.transport.base import Message
from paceline.schedule.slices import slice_name, split_name
from paceline.step.context import TrainingContext

_TAG = (1 << 26) - 1


def consolidate_state_dict(context: TrainingContext, owned: Sequence[frozenset[str] | None]) -> None:
    """Give every worker the whole state. All workers call this together.

    Args:
        context: training context.
        owned: for each worker, the parameters and buffers of which it has the newest values, or slices of parameters
            (``schedule.slices``). None means all. Together the workers must have all of them. If several workers have a
            tensor or the same slice of it, the lowest rank sends it.

    Raises:
        CheckpointError: the state of the optimizer is more than tensors and numbers of its parameters.
        WorkerLost: a worker was lost before the state was gathered. Nothing has been changed.
    """
    check_savable(context.update.optimizer)
    world = context.world
    state = named_tensors(context.compute.model, context.update.optimizer)
    everything = frozenset(map(_bare, state))
    held = [everything if part is None else part for part in owned]
    own = held[world.rank].difference(*held[: world.rank])
    mine = _parts_of(state, own, {name: value.numel() for name, value in context.compute.model.named_parameters()})
    parts: list[Kinds] = world.gather(kinds_of(mine), "synchronizing")
    world.await_process_group()
    flats = [torch.empty(room_of(part), dtype=torch.uint8, device=world.device) for part in parts]
    for name, view in views_of(flats[world.rank], parts[world.rank]).items():
        view.copy_(mine[name])
    peers = [rank for rank in range(world.size) if rank != world.rank]
    sends = [Message(flats[world.rank], peer, _TAG) for peer in peers if parts[world.rank]]
    receives = [Message(flats[peer], peer, _TAG) for peer in peers if parts[peer]]
    for transfer in world.start_transfers(sends, receives, "while the workers gathered the state"):
        transfer.wait()
    world.synchronize()
    gathered: dict[str, torch.Tensor] = {}
    for flat, part in zip(flats, parts, strict=True):
        gathered.update(views_of(flat, part))
    shapes = {name: value.shape for name, value in context.compute.model.named_parameters()}
    optimizer: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for one, value in gathered.items():
            name, part_of = split_name(one)
            if name.startswith("optimizer/"):
                if part_of is None:
                    optimizer[name] = value
                    continue
                whole = optimizer.setdefault(name, value.new_empty(shapes[_bare(name)]))
            else:
                whole = state[name]
            if one not in mine or part_of is not None:
                (whole if part_of is None else whole.view(-1)[part_of]).copy_(value)
    load_optimizer_state(context.compute.model, context.update.optimizer, optimizer)


def _parts_of(state: dict[str, torch.Tensor], own: frozenset[str], sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the tensors of owned parameters and buffers, and the owned slices of tensors of their sizes."""
    slices: dict[str, list[slice]] = {}
    for one in sorted(own):
        name, part = split_name(one)
        slices.setdefault(name, []).extend([part] if part else [])
    found = {}
    for full, value in state.items():
        name = _bare(full)
        for part in slices.get(name, ()):
            if value.numel() == sizes[name]:
                found[slice_name(full, part.start, part.stop)] = value.reshape(-1)[part]
        if name in slices and (not slices[name] or value.numel() != sizes[name]):
            found[full] = value  # a number of a sliced parameter, such as its step, is the same on all its owners
    return found


def _bare(name: str) -> str:
    """Return the parameter or buffer to which a tensor of the state belongs."""
    kind, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if kind == "optimizer" else rest
