"""Optimizer shards. Each worker updates only the slices that it holds, and keeps the optimizer state for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.tensors import entries_of, laid_out, put_entry
from paceline.comm.reduction.buckets import split
from paceline.schedule import slices
from paceline.schedule.link_shares import full
from paceline.schedule.slices import Slice, of_size, slice_name, split_name
from paceline.step.context import TrainingContext
from paceline.step.optimizer import OptimizerStep
from paceline.step.optimizers.exclusive import guard_parts
from paceline.step.optimizers.several import parts_of
from paceline.step.probes.slice_probe import updates_slices_alike


def slices_of(context: TrainingContext, workers: int) -> list[Slice]:
    """Return the slices of the trained parameters, each with its owner: last parameter first, then those of tables.

    A parameter is cut only if that does not change the bits of its update: the optimizer works element by element. If
    the norm of each gradient is needed to clip, only parameters that are larger than a share are cut, because such a
    norm takes the whole gradient on one worker. Tables with sparse gradients are cut by rows.
    """
    named = [*context.update.parameters.items()]  # whose values may not be computed yet
    dense = [place for place, (name, _) in enumerate(named) if name not in context.sparse]
    found = [one._replace(parameter=dense[one.parameter]) for one in _dense_slices(context, dense, workers)]
    sparse = {place: one for place, (name, one) in enumerate(named) if name in context.sparse and one.numel()}
    counts = {place: one.shape[0] if _can_be_cut(one) else 1 for place, one in sparse.items()}
    tables = {place: (count, sparse[place].numel() // count) for place, count in counts.items()}
    return found + slices.rows(tables, workers)


def _dense_slices(context: TrainingContext, dense: Sequence[int], workers: int) -> list[Slice]:
    update, settings = context.update, context.settings
    every = [*update.parameters.values()]
    parameters: list[torch.Tensor] = [every[place] for place in dense]
    sizes = [value.numel() for value in parameters]
    cut = [*range(len(sizes))] if settings.clip_norm is None else slices.large(sizes, workers)
    able = not update.names and all(_can_be_cut(parameters[index]) for index in cut)
    if not all(context.world.gather(able and slices_alike(context), "start")):
        cut = []
    if len(cut) < len(sizes):
        return slices.partly_cut(sizes, cut, workers)[::-1]
    last = len(parameters) - 1
    runs = split(parameters[::-1], full(workers))
    return slices.even(sizes, [[last - place for place in run] for run in runs], workers)


def slices_alike(context: TrainingContext) -> bool:
    """Return whether slices get the same update as whole parameters. The optimizer is probed once."""
    if (found := context.probe_results).slices_alike is None:
        found.slices_alike = updates_slices_alike(context.update.optimizer)
    return found.slices_alike


def _can_be_cut(value: torch.Tensor) -> bool:
    """Return whether slices of the flattened parameter are contiguous in memory and update with the same bits.

    16-bit types are not cut, because torch's threads divide their updates at indices that depend on the tensor's size.
    """
    laid_out_in_order = value.is_contiguous() or not any(value.stride())  # the rows may be on other machines
    return laid_out_in_order and value.dtype in (torch.float32, torch.float64)


class OptimizerShard:
    """This worker's shard of an optimizer: the slices that it owns or copies, and their optimizer state.

    Between updates, the optimizer's groups hold the parameters themselves, as the script and its schedule expect.

    Args:
        context: training context.
        every: slices of all workers.
        held: indices of the slices of this shard.
        stored: the slices in memory of their own, by index. Defaults to slices of the parameters' memory.

    Attributes:
        own: parameter that the optimizer updates for each held slice, by index: a slice in ``stored``, a slice that
            shares the memory of its parameter, or the parameter itself.
        divided: whether the optimizer has only the state of the held slices.
    """

    def __init__(
        self,
        context: TrainingContext,
        every: Sequence[Slice],
        held: Iterable[int],
        stored: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._optimizer, self._names = context.update.optimizer, list(context.update.parameters)
        self._parameters, self._row_states = list(context.update.parameters.values()), context.update.row_states
        self._every, self._stored = every, stored
        self.divided, self._guards = False, list[Callable[[], None]]()
        self.own = {index: self._slice(index, every[index]) for index in held}

    def _slice(self, index: int, one: Slice) -> nn.Parameter:
        parameter = self._parameters[one.parameter]
        if self._stored is not None:
            return nn.Parameter(self._stored[index], requires_grad=parameter.requires_grad)
        if one.stop - one.start == parameter.numel():
            return parameter
        return nn.Parameter(part_of(parameter.detach(), one), requires_grad=parameter.requires_grad)

    def follow(self) -> None:
        """Point the slices to the memory of their parameters again, in case the script has replaced ``.data``."""
        for index, value in self.own.items():
            one = self._every[index]
            if value is not self._parameters[one.parameter]:
                value.data = part_of(self._parameters[one.parameter].detach(), one)

    @property
    def names(self) -> frozenset[str]:
        """Names of the held parameters and slices, see ``schedule.slices``."""
        return frozenset(self.name_of(self._every[index]) for index in self.own)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state of the held parameters and slices by name, see ``schedule.slices``."""
        found = {}
        for optimizer in parts_of(self._optimizer):
            for index, value in self.own.items():
                one = self._every[index]
                for key, tensor in entries_of(optimizer.state.get(value, {})):
                    name = f"optimizer/{self._names[one.parameter]}/{key}"
                    cut = not self._is_whole(one) and (tensor.shape == value.shape or name in self._row_states)
                    part = self._part_of(one, self._shape_of(name, one))
                    found[slice_name(name, part.start, part.stop) if cut else name] = tensor.view(-1) if cut else tensor
        return found

    def _shape_of(self, name: str, one: Slice) -> torch.Size:
        """Return the shape of a tensor of the state of a parameter if it is cut as a slice of that is."""
        return self._row_states.get(name, self._parameters[one.parameter].shape)

    def _part_of(self, one: Slice, shape: torch.Size) -> slice:
        return of_size(slice(one.start, one.stop), shape.numel(), self._parameters[one.parameter].numel())

    def _cut(self, name: str, entry: Any, one: Slice) -> Any:
        """Return a slice of an entry of the state of a parameter, by its name."""
        if self._is_whole(one) or not isinstance(entry, torch.Tensor):
            return entry
        if entry.shape != (shape := self._shape_of(name, one)):
            return entry.clone()
        part = entry.contiguous().view(-1)[self._part_of(one, shape)]
        return (part.view(-1, *shape[1:]) if one.row else part).clone()

    def entries(self, key: str) -> dict[int, torch.Tensor]:
        """Return the tensors under a key of the state, by index of the held slice."""
        states = [optimizer.state for optimizer in parts_of(self._optimizer)]
        held = ((index, state.get(value, {}).get(key)) for index, value in self.own.items() for state in states)
        return {index: tensor for index, tensor in held if tensor is not None}

    def name_of(self, one: Slice) -> str:
        """Return the name of a slice or of a parameter that is not cut, see ``schedule.slices``."""
        name = self._names[one.parameter]
        return name if self._is_whole(one) else slice_name(name, one.start, one.stop)

    def _is_whole(self, one: Slice) -> bool:
        return one.stop - one.start == self._parameters[one.parameter].numel()

    def _held(self) -> dict[nn.Parameter, list[tuple[Slice, nn.Parameter]]]:
        """Return the held slices of each parameter."""
        held: dict[nn.Parameter, list[tuple[Slice, nn.Parameter]]] = {}
        for index, value in self.own.items():
            one = self._every[index]
            held.setdefault(self._parameters[one.parameter], []).append((one, value))
        return held

    def divide(self) -> None:
        """Keep only the state of the held slices."""
        if self.divided:
            return
        self.divided, held = True, self._held()
        for optimizer in parts_of(self._optimizer):
            self._guards.append(guard_parts(optimizer))
            for parameter in [one for group in optimizer.param_groups for one in group["params"]]:
                state = optimizer.state.pop(parameter, None)
                for one, value in held.get(parameter, ()) if state else ():
                    prefix = f"optimizer/{self._names[one.parameter]}/"
                    optimizer.state[value] = {key: self._cut(prefix + key, entry, one) for key, entry in state.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the parameters in the optimizer's groups by the held slices for the duration of the context."""
        held = self._held()
        groups = [group for optimizer in parts_of(self._optimizer) for group in optimizer.param_groups]
        kept = [group["params"] for group in groups]
        try:
            for group, parameters in zip(groups, kept, strict=True):
                group["params"] = [value for parameter in parameters for _, value in held.get(parameter, ())]
            yield
        finally:
            for group, parameters in zip(groups, kept, strict=True):
                group["params"] = parameters

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the state by tensors of the owned parameters and slices, by name as in :meth:`tensors`.

        The optimizer gets the tensors themselves, or copies of numbers and of parts of whole tensors.
        """
        for optimizer in parts_of(self._optimizer):
            optimizer.state.clear()
        self.divide()
        group_of = {
            one: (part, group)
            for part in parts_of(self._optimizer)
            for group in part.param_groups
            for one in group["params"]
        }
        owned: dict[str, list[tuple[Slice, nn.Parameter]]] = {}
        for index, value in self.own.items():
            owned.setdefault(self._names[self._every[index].parameter], []).append((self._every[index], value))
        for entire, entry in tensors.items():
            full, part = split_name(entire)
            name, _, key = full.removeprefix("optimizer/").rpartition("/")
            for one, value in owned.get(name, ()) if entire.startswith("optimizer/") else ():
                shape = self._shape_of(full, one)
                if part is None or part == self._part_of(one, shape):
                    optimizer, group = group_of[self._parameters[one.parameter]]
                    on_host = key == "step" and not entry.ndim and not (group.get("fused") or group.get("capturable"))
                    wanted = (-1, *shape[1:]) if full in self._row_states else value.shape
                    own = self._cut(full, entry, one) if part is None else entry.view(wanted)
                    own = own if on_host else laid_out(own.to(value.device), value)
                    put_entry(optimizer.state.setdefault(value, {}), key, own)

    def release(self) -> dict[str, torch.Tensor]:
        """Remove the state of the held slices from the optimizer, and return it as :meth:`tensors` does."""
        self.divide()
        found, self.divided = self.tensors(), False
        while self._guards:
            self._guards.pop()()
        for optimizer in parts_of(self._optimizer):
            for value in self.own.values():
                optimizer.state.pop(value, None)
        return found

    def drop(self) -> None:
        """Drop the held slices, which may lie in memory that the workers share."""
        self.own.clear()
        self._stored = None


def unite(update: OptimizerStep, tensors: dict[str, torch.Tensor]) -> None:
    """Move the state of slices into states of whole parameters. All other elements are undefined.

    Args:
        tensors: state by name, as :meth:`OptimizerShard.tensors` returns it. Emptied.
    """
    states = {
        parameter: optimizer.state
        for optimizer in parts_of(update.optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    while tensors:
        full, value = tensors.popitem()
        if full.startswith("parameter/"):  # rows of a divided table, or slices of an interrupted update
            name, part = split_name(full.removeprefix("parameter/"))
            update.parameters[name].detach().view(-1)[part or slice(None)] = value.view(-1)
            continue
        entire, part = split_name(full)
        name, _, key = entire.removeprefix("optimizer/").rpartition("/")
        parameter = update.parameters[name]
        state = states[parameter][parameter]
        if part is None:
            put_entry(state, key, value)
        else:
            if key not in state:
                shape = update.row_states.get(entire, parameter.shape)
                state[key] = torch.zeros(shape, dtype=value.dtype, device=value.device)
            state[key].view(-1)[part] = value


def part_of(value: torch.Tensor, one: Slice) -> torch.Tensor:
    """Return a slice of a tensor of the parameter's shape, or the tensor itself if it is not cut.

    The slice is flat, or has the rows of a table.
    """
    if one.stop - one.start == value.numel():
        return value
    part = value.view(-1)[one.start : one.stop]
    return part.view(-1, *value.shape[1:]) if one.row else part
