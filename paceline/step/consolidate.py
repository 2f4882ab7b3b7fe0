"""Consolidation of a training state that is divided among the workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.checkpoint.tensors import check_savable, load_optimizer_state, named_tensors
from paceline.comm.shm.tensors import Kinds, kinds_of, room_of, views_of
from paceline.comm.transport.base import Message
from paceline.step.context import TrainingContext

_TAG = (1 << 26) - 1


def consolidate_state_dict(context: TrainingContext, owned: Sequence[frozenset[str] | None]) -> None:
    """Give every worker the whole state. All workers call this together.

    Args:
        context: training context.
        owned: for each worker, the parameters and buffers of which it has the newest values. None means all. Together
            the workers must have all of them. If several workers have a tensor, the lowest rank sends it.

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
    mine = {name: value for name, value in state.items() if _bare(name) in own}
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
    with torch.no_grad():
        for name, value in state.items():
            if name in gathered and name not in mine and not name.startswith("optimizer/"):
                value.copy_(gathered[name])
    optimizer = {name: value for name, value in gathered.items() if name.startswith("optimizer/")}
    load_optimizer_state(context.compute.model, context.update.optimizer, optimizer)


def _bare(name: str) -> str:
    """Return the parameter or buffer to which a tensor of the state belongs."""
    kind, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if kind == "optimizer" else rest
