"""Patches of ``torch.distributed`` that record each collective call of the script (``comm.desync.recorder``).

The functions are replaced in ``torch.distributed`` and in modules of the script that have imported them by name. They
are not replaced in ``torch.distributed.distributed_c10d``, because its functions call each other
(``all_gather_object`` calls ``all_gather``), so a call would be counted several times, and because torch's compiler
identifies them by identity.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from time import perf_counter
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.desync.compare import SYMMETRIC
from paceline.comm.desync.recorder import CallRecorder, Group, What, hash_of
from paceline.system import user_code

_KINDS = 4096  # Maximum number of cached kinds of calls. The text of a cached kind is built once.
_SHOWN = 4
_OPERATIONS = {
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter_single": "input",
    "reduce": "tensor",
    "broadcast": "tensor",
    "gather": "tensor",
    "scatter": "tensor",
    "all_gather": "tensor_list",
    "all_gather_coalesced": "input_tensor_list",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
    "barrier": "",
    "monitored_barrier": "",
    "all_gather_object": "",
    "broadcast_object_list": "",
    "gather_object": "",
    "scatter_object_list": "",
}
"""The argument of each operation, a tensor or a list, whose shapes and types must agree on all members of the group."""


class Arguments:
    """Arguments of calls of a ``torch.distributed`` function, by name."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._places = {name: place for place, name in enumerate(inspect.signature(original).parameters)}
        self.root = next((name for name in ("src", "dst") if name in self._places), None)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
        """Return an argument, or None if it is not given."""
        return args[place] if (place := self._places.get(name, len(args))) < len(args) else kwargs.get(name)


def _nothing(seconds: float = 0.0) -> None:
    pass


_current: weakref.ref[CallRecorder] | None = None
_ready: Callable[[], None] = _nothing
_waited: Callable[[float], None] = _nothing
_replaced: list[tuple[ModuleType, str, Callable[..., Any], Callable[..., Any]]] = []
_kinds: dict[object, What] = {}


def record_in(calls: CallRecorder, ready: Callable[[], None], waited: Callable[[float], None]) -> None:
    """Record the script's calls in a recorder while it exists.

    Args:
        ready: waits for the group before each call.
        waited: gets the duration of each call that meets all other workers.
    """
    global _current, _ready, _waited
    _ready, _waited = ready, waited
    _current = weakref.ref(calls)
    _groups.clear()
    if _replaced:
        return
    atexit.register(stop)
    recorded = {}
    for name in _OPERATIONS:
        if (original := getattr(dist, name, None)) is not None:
            recorded[original] = recorder(name, original)
            _replace(dist, name, original, recorded[original])
    for module in user_code.script_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value in recorded:
                _replace(module, name, value, recorded[value])


def stop() -> None:
    """Stop recording and restore torch's functions."""
    global _current, _ready, _waited
    _current, _ready, _waited = None, _nothing, _nothing
    for module, name, original, recorded in _replaced:
        if getattr(module, name, None) is recorded:
            setattr(module, name, original)
    _replaced.clear()


def _replace(module: ModuleType, name: str, original: Callable[..., Any], recorded: Callable[..., Any]) -> None:
    setattr(module, name, recorded)
    _replaced.append((module, name, original, recorded))


def recorder(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operation so that it records each call before making it."""
    arguments = Arguments(original)

    @functools.wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        _ready()
        calls = _current() if _current is not None else None
        if calls is None:
            return original(*args, **kwargs)
        find = functools.partial(arguments.find, args, kwargs)
        try:
            given = find("group")
            group = _group(given) if given is not None else None
            what = _what(name, arguments.root, find)
        except (AttributeError, IndexError, TypeError, ValueError):  # invalid arguments: torch raises its own error
            return original(*args, **kwargs)
        waits, begin = not find("async_op"), perf_counter()
        if (call := calls.enter(what, group, sys._getframe(1), waits=waits)) is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except RuntimeError as error:
            if (better := calls.failed(call, error)) is error:
                raise
            raise better from error
        if waits and what.meets and group is None:
            _waited(perf_counter() - begin)
        return result

    return recorded


def _what(name: str, root: str | None, find: Callable[[str], Any]) -> What:
    """Return what must agree in a call. Its text is built at the first call of a kind.

    Args:
        root: name of the argument with the rank that sends or receives everything, if there is one.
    """
    given = find(_OPERATIONS[name])
    several = isinstance(given, list | tuple)
    # rows that all workers exchange may differ in their number
    typed = name.startswith("all_to_all") and (several or find("output_split_sizes") or find("input_split_sizes"))
    tensors: object = None
    if given is not None and typed:
        tensors = (given[0] if several else given).dtype
    elif given is not None:
        tensors = tuple([(one.shape, one.dtype) for one in given]) if several else (given.shape, given.dtype)
    reduce = find("op")
    rank = 0 if root is None else int(find(root) or find(f"group_{root}") or 0)
    key = name, tensors, reduce, rank
    if (found := _kinds.get(key)) is None:
        rooted = "" if root is None else f" {'from' if root == 'src' else 'to'} rank {rank}"
        text = name + _tensors_in_words(tensors, several, typed) + _reduced(reduce) + rooted
        symmetric = name in SYMMETRIC
        found = What(text, hash_of(text), symmetric, meets=symmetric or name == "barrier")
        if len(_kinds) < _KINDS:
            _kinds[key] = found
    return found


def _group(given: Any) -> Group | None:
    if given is dist.group.WORLD:
        return None
    name = given.group_name
    if (found := _groups.get(name)) is None:
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
