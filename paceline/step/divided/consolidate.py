"""Consolidation of a training state that is divided among the workers."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial

import torch

from paceline.checkpoint.tensors import check_savable, load_optimizer_state, named_tensors
from paceline.schedule.slices import of_size, slice_name, split_name
from paceline.step.context import TrainingContext
from paceline.step.divided.tensors import Division


def consolidate_state_dict(context: TrainingContext, owned: Sequence[frozenset[str] | None]) -> None:
    """Give every worker the whole state. All workers call this together.

    Args:
        owned: for each worker, the parameters and buffers of which it has the newest values, or slices of parameters
            (``schedule.slices``). None means all. Together the workers must have all of them. If several workers have a
            tensor or the same slice of it, the lowest rank sends it.

    Raises:
        CheckpointError: the state of the optimizer is more than tensors and numbers of its parameters.
        WorkerLost: a worker was lost before the state was gathered. The state that this worker owns is unchanged.
    """
    check_savable(context.update.optimizer)
    world, model = context.world, context.compute.model
    state = named_tensors(model, context.update.optimizer)
    everything = frozenset(map(parameter_of, state))
    held = [everything if part is None else part for part in owned]
    own = held[world.rank].difference(*held[: world.rank])
    parameters = dict(model.named_parameters())
    sizes = {name: value.numel() for name, value in parameters.items()}
    mine = _parts_of(state, own, sizes, context.update.row_states)
    division = Division(world, mine, partial(shape_of, context), "synchronizing")
    with torch.no_grad():
        load_optimizer_state(model, context.update.optimizer, _optimizer_tensors(division, state, mine, world.size))


def _optimizer_tensors(
    division: Division, state: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor], workers: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the optimizer's state, and copy all other tensors into those of this worker."""
    everyone = range(workers)
    for name, value in division.put_together([*division.parts], lambda _: everyone):
        if name.startswith("optimizer/"):
            yield name, value
        elif name not in mine:
            state[name].copy_(value)


def _parts_of(
    state: dict[str, torch.Tensor], own: frozenset[str], sizes: Mapping[str, int], rows: Container[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors of owned parameters and buffers, and the owned slices of tensors of their sizes or rows."""
    slices: dict[str, list[slice]] = {}
    for one in sorted(own):
        name, part = split_name(one)
        slices.setdefault(name, []).extend([part] if part else [])
    found = {}
    for full, value in state.items():
        name = parameter_of(full)
        cut = full in rows or value.numel() == sizes.get(name)
        for part in slices.get(name, ()) if cut else ():
            own_part = of_size(part, value.numel(), sizes[name])
            found[slice_name(full, own_part.start, own_part.stop)] = value.reshape(-1)[own_part]
        if name in slices and not (slices[name] and cut):
            found[full] = value  # a number of a sliced parameter, such as its step, is the same on all its owners
    return found


def shape_of(context: TrainingContext, name: str) -> torch.Size:
    """Return the shape of a tensor of the state of which workers hold slices."""
    return context.update.row_states.get(name, context.update.parameters[parameter_of(name)].shape)


def parameter_of(name: str) -> str:
    """Return the parameter or buffer to which a tensor of the state belongs."""
    kind, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if kind == "optimizer" else rest
