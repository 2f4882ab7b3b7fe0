"""Patches of ``torch.distributed`` that record each collective call of the script (``comm.desync.recorder``).

The functions are replaced in ``torch.distributed`` and in modules of the script that have imported them by name. They
are not replaced in ``torch.distributed.distributed_c10d``, because its functions call each other
(``all_gather_object`` calls ``all_gather``), so a call would be counted several times, and because torch's compiler
identifies them by identity.
"""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.desync.compare import SYMMETRIC
from paceline.comm.desync.recorder import CallRecorder, Group, What, hash_of
from paceline.system import user_code

Place = tuple[int, str]  # position and name of an argument

_KINDS = 4096  # Maximum number of cached kinds of calls. The text of a cached kind is built once.
_SHOWN = 4


@dataclass(frozen=True)
class Operation:
    """The arguments of a ``torch.distributed`` function that must agree on all members of the group."""

    group: Place  # the argument with the group
    tensors: Place | None = None  # a tensor or a list of tensors, whose shapes and types must agree
    # not None if only the type must agree, provided that the tensors are a list or split sizes are given
    typed: str | None = None
    reduce: Place | None = None  # the kind of reduction
    root: Place | None = None  # the rank that sends or receives everything: ``src`` or ``dst``
    waits: Place | None = None  # ``async_op``, or None if the function has no such argument


def _reduction(group: int, tensors: Place, reduce: int) -> Operation:
    return Operation((group, "group"), tensors, reduce=(reduce, "op"), waits=(group + 1, "async_op"))


def _plain(group: int, tensors: Place) -> Operation:
    return Operation((group, "group"), tensors, waits=(group + 1, "async_op"))


OPERATIONS = {
    "all_reduce": _reduction(2, (0, "tensor"), 1),
    "all_reduce_coalesced": _reduction(2, (0, "tensors"), 1),
    "reduce_scatter": _reduction(3, (1, "input_list"), 2),
    "reduce_scatter_tensor": _reduction(3, (1, "input"), 2),
    "reduce_scatter_single": _reduction(3, (1, "input"), 2),
    "reduce": Operation((3, "group"), (0, "tensor"), reduce=(2, "op"), root=(1, "dst"), waits=(4, "async_op")),
    "broadcast": Operation((2, "group"), (0, "tensor"), root=(1, "src"), waits=(3, "async_op")),
    "gather": Operation((3, "group"), (0, "tensor"), root=(2, "dst"), waits=(4, "async_op")),
    "scatter": Operation((3, "group"), (0, "tensor"), root=(2, "src"), waits=(4, "async_op")),
    "all_gather": _plain(2, (0, "tensor_list")),
    "all_gather_coalesced": _plain(2, (1, "input_tensor_list")),
    "all_gather_into_tensor": _plain(2, (1, "input_tensor")),
    "all_gather_single": _plain(2, (1, "input_tensor")),
    "all_to_all": Operation((2, "group"), (1, "input_tensor_list"), typed="", waits=(3, "async_op")),
    "all_to_all_single": Operation((4, "group"), (1, "input"), typed="input_split_sizes", waits=(5, "async_op")),
    "barrier": Operation((0, "group"), waits=(1, "async_op")),
    "monitored_barrier": Operation((0, "group")),
    "all_gather_object": Operation((2, "group")),
    "broadcast_object_list": Operation((2, "group"), root=(1, "src")),
    "gather_object": Operation((3, "group"), root=(2, "dst")),
    "scatter_object_list": Operation((3, "group"), root=(2, "src")),
}


def _nothing() -> None:
    pass


_current: weakref.ref[CallRecorder] | None = None
_ready: Callable[[], None] = _nothing
_replaced: list[tuple[ModuleType, str, Callable[..., Any], Callable[..., Any]]] = []
_kinds: dict[object, What] = {}


def record_in(calls: CallRecorder, ready: Callable[[], None]) -> None:
    """Record the script's calls in a recorder while it exists. ``ready`` waits for the group before each call."""
    global _current, _ready
    _ready = ready
    _current = weakref.ref(calls)
    _groups.clear()
    if _replaced:
        return
    atexit.register(stop)
    recorded = {}
    for name in OPERATIONS:
        original = getattr(dist, name, None)
        if original is not None:
            recorded[original] = recorder(name, original)
            _replace(dist, name, original, recorded[original])
    for module in user_code.script_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value in recorded:
                _replace(module, name, value, recorded[value])


def stop() -> None:
    """Stop recording and restore torch's functions."""
    global _current, _ready
    _current, _ready = None, _nothing
    for module, name, original, recorded in _replaced:
        if getattr(module, name, None) is recorded:
            setattr(module, name, original)
    _replaced.clear()


def _replace(module: ModuleType, name: str, original: Callable[..., Any], recorded: Callable[..., Any]) -> None:
    setattr(module, name, recorded)
    _replaced.append((module, name, original, recorded))


def recorder(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operation so that it records each call before making it."""
    operation = OPERATIONS[name]

    @functools.wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        _ready()
        calls = _current() if _current is not None else None
        if calls is None:
            return original(*args, **kwargs)
        try:
            given = _argument(args, kwargs, operation.group)
            group = _group(given) if given is not None else None
            what = _what(name, operation, args, kwargs)
        except (AttributeError, IndexError, TypeError, ValueError):  # invalid arguments: torch raises its own error
            return original(*args, **kwargs)
        waits = operation.waits is None or not _argument(args, kwargs, operation.waits)
        call = calls.enter(what, group, sys._getframe(1), waits)
        if call is None:
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            better = calls.failed(call, error)
            if better is error:
                raise
            raise better from error

    return recorded


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Any:
    return args[place[0]] if place[0] < len(args) else kwargs.get(place[1])


def _what(name: str, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> What:
    """Return what must agree in a call. Its text is built at the first call of a kind."""
    given = _argument(args, kwargs, operation.tensors) if operation.tensors else None
    several = isinstance(given, list | tuple)
    typed = operation.typed is not None and (several or _splits(args, kwargs))
    tensors: object = None
    if given is not None and typed:
        tensors = (given[0] if several else given).dtype
    elif given is not None:
        tensors = tuple([(one.shape, one.dtype) for one in given]) if several else (given.shape, given.dtype)
    reduce = _argument(args, kwargs, operation.reduce) if operation.reduce else None
    root = _root(args, kwargs, operation.root) if operation.root else None
    key = name, tensors, reduce, root
    found = _kinds.get(key)
    if found is None:
        text = name + _tensors_in_words(tensors, several, typed) + _reduced(reduce) + _rooted(operation, root)
        symmetric = name in SYMMETRIC
        found = What(text, hash_of(text), symmetric, meets=symmetric or name == "barrier")
        if len(_kinds) < _KINDS:
            _kinds[key] = found
    return found


def _splits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of ``all_to_all_single`` has split sizes, which may differ between workers."""
    return any(_argument(args, kwargs, place) for place in ((2, "output_split_sizes"), (3, "input_split_sizes")))


def _root(args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> int:
    given = _argument(args, kwargs, place)
    if given is None:
        given = kwargs.get("group_" + place[1])
    return int(given or 0)


def _group(given: Any) -> Group | None:
    if given is dist.group.WORLD:
        return None
    name = given.group_name
    found = _groups.get(name)
    if found is None:
        found = _groups[name] = Group(name, dist.get_process_group_ranks(given))
    return found


_groups: dict[str, Group] = {}


def _tensors_in_words(tensors: Any, several: bool, typed: bool) -> str:
    if tensors is None:
        return ""
    if typed:
        return f" of {_type(tensors)}"
    if not several:
        return f" of {_type(tensors[1])} {list(tensors[0])}"
    each = [f"{_type(dtype)} {list(shape)}" for shape, dtype in tensors]
    if len(each) > 1 and len(set(each)) == 1:
        return f" of {len(each)} x {each[0]}"
    more = f" and {len(each) - _SHOWN} more ({hash_of(str(each)) % 16**4:04x})" if len(each) > _SHOWN else ""
    return f" of {', '.join(each[:_SHOWN])}{more}"


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reduced(reduce: Any) -> str:
    if reduce is None or reduce == dist.ReduceOp.SUM:
        return ""
    return f" ({str(getattr(reduce, 'name', reduce)).rpartition('.')[2].lower()})"


def _rooted(operation: Operation, root: int | None) -> str:
    if operation.root is None:
        return ""
    return f" {'from' if operation.root[1] == 'src' else 'to'} rank {root}"
