"""Construction of a model without memory, and computation of its initial values."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from paceline.checkpoint.tensors import hash_of
from paceline.checkpoint.weights.deferred.heap import FreedMemory
from paceline.checkpoint.weights.deferred.recorder import AddressReads, Recorder
from paceline.checkpoint.weights.deferred.tensors import Deferred, can_defer, deferred_in
from paceline.errors import InputError
from paceline.system.process_memory import keep_freed_pages
from paceline.system.torch_internals import BUFFERS, MODULES, PARAMETERS

_is_recording: ContextVar[bool] = ContextVar("_is_recording", default=False)


@contextmanager
def deferred() -> Iterator[None]:
    """Build a model without memory for its parameters and buffers.

    :func:`paceline.start` computes the value that each of them would have without ``deferred``, with the same bits, one
    at a time. Building the model needs memory for about two of its largest parameters. Between the block and
    ``start``, the model has its names, shapes and types, but its values cannot be used. In the block, values can be
    used and random numbers are drawn as usual. Values from NumPy, files or other libraries, and tensors that
    a module holds as plain attributes, stay in memory.

    Examples:
        >>> import paceline, torch
        >>> with paceline.deferred():
        ...     model = torch.nn.Linear(1000, 1000)
        >>> model.weight.shape, model.weight.untyped_storage().nbytes()
        (torch.Size([1000, 1000]), 0)

    Raises:
        InputError: a module is built from a tensor subclass with its own operators, or the script uses a value before
            :func:`paceline.start`.
    """
    if _is_recording.get():
        yield
        return
    keep_freed_pages(large=False)  # freed values leave gaps in the heap, into which gradients would fit badly
    recorder = Recorder()
    token = _is_recording.set(True)
    try:
        with AddressReads(recorder), recorder:
            yield
    finally:
        _is_recording.reset(token)
        _release(recorder)


def _release(recorder: Recorder) -> None:
    """Free the memory of all parameters and buffers, and fill all other tensors with their values."""
    storages = recorder.storages()
    tensors, modules = _living()
    names = _names(modules)
    users = defaultdict(list)
    for tensor in tensors:
        if (found := recorder.find(tensor)) is not None:
            users[found].append(tensor)
    for one in storages:
        named = [names[id(tensor)] for tensor in users[one] if id(tensor) in names]
        if named and all(map(can_defer, users[one])):
            Deferred(named[0], one, users[one])
        else:
            one.fill()
    FreedMemory().trim()


def _living() -> tuple[list[torch.Tensor], list[nn.Module]]:
    """Return all tensors and modules of the process."""
    objects = gc.get_objects()
    tensor_kinds, module_kinds = _kinds(torch.Tensor), _kinds(nn.Module)
    tensors = [one for one in objects if type(one) in tensor_kinds]
    return tensors, [one for one in objects if type(one) in module_kinds]


def _kinds(base: type) -> set[type]:
    """Return a class and all that are derived from it."""
    found, waiting = {base}, [base]
    while waiting:
        new: set[type] = {*waiting.pop().__subclasses__()} - found
        found |= new
        waiting += new
    return found


def _names(modules: list[nn.Module]) -> dict[int, str]:
    """Return the names of parameters and buffers by ``id``, with the path from the outermost module."""
    parents: dict[int, tuple[nn.Module, str]] = {}
    for module in modules:
        for key, child in vars(module).get(MODULES, {}).items():
            parents.setdefault(id(child), (module, key))
    names: dict[int, str] = {}
    for module in modules:
        path, above, passed = "", parents.get(id(module)), set()
        while above is not None and id(above[0]) not in passed:
            passed.add(id(above[0]))
            path, above = f"{above[1]}.{path}", parents.get(id(above[0]))
        for name, tensor in [*vars(module).get(PARAMETERS, {}).items(), *vars(module).get(BUFFERS, {}).items()]:
            names.setdefault(id(tensor), path + name)
    return names


def materialize(model: nn.Module, device: torch.device | None = None, *, later: bool = False) -> None:
    """Give parameters and buffers of a model their initial values, one at a time.

    Tensors that already have values are left alone. The parameters stay the same objects. Tensors that share a storage
    still share it, unless they move to another device, as with ``Module.to``.

    Args:
        device: device to which each value is moved before the next one is computed. Defaults to the parameter's own.
        later: whether parameters whose memory no other tensor uses get their values on their first use, or from
            :func:`write_values`.

    Raises:
        InputError: the caller is inside a ``deferred`` block.
    """
    if _is_recording.get():
        raise InputError(
            "paceline.start was called inside the with block of paceline.deferred(), in which only models are built: "
            "end the block first."
        )
    users: dict[Deferred, list[torch.Tensor]] = defaultdict(list)
    for tensor in [*model.parameters(), *model.buffers()]:
        if (found := deferred_in(tensor)) is not None:
            users[found].append(tensor)
    if later:
        waiting = [one for one, (first, *_) in users.items() if isinstance(first, nn.Parameter) and one.is_only(first)]
        for one in waiting:
            one.on_demand = True
            del users[one]
    freed = FreedMemory()
    while users:  # keeps no reference to the memory of a value that has moved
        one = next(iter(users))
        one.fill()
        for tensor in users.pop(one):
            value = tensor.detach()
            if device is not None:
                tensor.data = value.to(device)
            if tensor.data_ptr() != value.data_ptr():
                freed.add(value.untyped_storage().nbytes())
        del value, one


def initial_hashes(model: nn.Module) -> dict[str, str]:
    """Return a hash of each value by name. A value that is not computed yet has the hash of its record."""
    values = [*model.named_parameters(), *model.named_buffers()]
    return {name: (_record_of(value) or hash_of(value).hex())[:16] for name, value in values}


def has_records(model: nn.Module) -> bool:
    """Return whether some values are not computed yet."""
    return any(deferred_in(value) is not None for value in model.parameters())


def _record_of(tensor: torch.Tensor) -> str:
    found = deferred_in(tensor)
    return "" if found is None else found.digest


def write_values(tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Write the values of a tensor into another one of the same layout, without any further memory."""
    if (found := deferred_in(tensor)) is not None:
        found.write(target)
    else:
        target.copy_(tensor.detach())


def move_into(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Let a tensor use other memory, which holds its values. A deferred tensor is no longer deferred."""
    if (found := deferred_in(tensor)) is not None:
        found.release(tensor)
    tensor.data = memory
