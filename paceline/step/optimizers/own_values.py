"""Attributes of an optimizer besides ``state`` and ``param_groups``, such as slow weights of a Lookahead.

Numbers, text, tensors, arrays, generators, and containers and plain objects of these are saved in checkpoints and sent
to joiners. A parameter is saved by its name. Other values are not saved, but their replacement causes a warning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.data.objects.attributes import same
from paceline.errors import InputError
from paceline.step.optimizers.several import parts_of
from paceline.system.torch_internals import SET_LATER
from paceline.system.user_code import is_user_class

_ABSENT = object()
_PLAIN = bool, int, float, str, type(None), numpy.bool_, numpy.int32, numpy.int64, numpy.float32, numpy.float64
_DEEPEST = 8
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "deque": deque}
_NOT_KEPT = (
    "The update has changed {name}, a {kind}, which checkpoints and joining workers do not get: a resumed run "
    "continues with the optimizer's initial value. Keep numbers and tensors, preferably in optimizer.state[parameter]."
)


_NOT_OF_ALL = (
    "{what} in {name}, and with strategy {strategy!r} not every worker makes every update: no worker has all of it "
    "to save or to send to a joiner. Keep it in optimizer.state[parameter], or use strategy 'allreduce'."
)


@cache
def _of_torch() -> frozenset[str]:
    """Return the attributes that torch sets on each optimizer, and those that a schedule sets when it wraps ``step``.

    Not computed at import, because a process from which workers are forked must not run torch operations.
    """
    made = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    return frozenset({*made, "step", *SET_LATER})


class _NotKeptError(TypeError):
    """The type of a value cannot be saved."""


class OwnValues:
    """Attributes of an optimizer, of the optimizers that it holds, and of the plain objects that these hold."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        # called with a warning, once for each value that is not saved although an update has replaced it
        self.tell: Callable[[str], None] = lambda text: None
        self._optimizer = optimizer
        self._names = {id(value): name for name, value in parameters.items()}
        self._parameters = dict(parameters)
        self._others = {name: value for name, value, written in self._written() if written is None}
        self._told: set[str] = set()

    def state(self, step: int) -> dict[str, Any]:
        """Return the values by name, for a checkpoint or another worker."""
        found = {}
        for name, value, written in self._written():
            if written is not None:
                found[name] = written
            elif self._others.get(name, _ABSENT) is not value and name not in self._told:
                self._told.add(name)
                self.tell(_NOT_KEPT.format(name=name, kind=type(value).__name__))
        return found

    def load(self, state: dict[str, Any]) -> None:
        """Restore values that :meth:`state` returned. Tensors and containers stay the same objects."""
        owners = dict(self._owners())
        for name, written in state.items():
            where, _, key = name.rpartition(".")
            if where in owners:
                entries = vars(owners[where])
                entries[key] = self._restored(entries.get(key), written)
            elif name not in self._told:  # its object was made by an update
                self._told.add(name)
                self.tell(_NOT_KEPT.format(name=name, kind="value of an object that it has made"))

    @property
    def tensors(self) -> list[str]:
        """Names of the attributes that hold tensors or arrays, besides parameters."""
        return [name for name, _, written in self._written() if written is not None and _has_tensors(written)]

    def _written(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield each value with its name and its saved form, which is None if the value cannot be saved."""
        owners = [*self._owners()]
        elsewhere = {id(self._optimizer.param_groups), id(self._optimizer.state), *(id(owner) for _, owner in owners)}
        for where, owner in owners:
            for key, value in vars(owner).items():
                if id(value) in elsewhere or (isinstance(owner, Optimizer) and key in _of_torch()):
                    continue
                if isinstance(value, torch.device):  # each worker has its own
                    continue
                try:
                    written = self._write(value, 0)
                except _NotKeptError:
                    written = None
                yield f"{where}.{key}", value, written

    def _owners(self) -> Iterator[tuple[str, Any]]:
        """Yield the optimizer, the optimizers that it holds, and the plain objects that these hold, by name."""
        seen: set[int] = set()
        waiting: list[tuple[str, Any]] = [
            ("optimizer" if one is self._optimizer else f"optimizer {number}", one)
            for number, one in enumerate(parts_of(self._optimizer))
        ]
        while waiting:
            where, owner = waiting.pop(0)
            if id(owner) not in seen:
                seen.add(id(owner))
                yield where, owner
                waiting += ((f"{where}.{key}", one) for key, one in vars(owner).items() if _is_owner(one))

    def _write(self, value: Any, depth: int) -> list[Any]:
        """Convert a value to a pair of its kind and its content."""
        if isinstance(value, torch.Tensor):
            name = self._names.get(id(value))
            if name is None and (value.layout != torch.strided or isinstance(value, nn.Parameter)):
                raise _NotKeptError
            return ["tensor", value.detach()] if name is None else ["parameter", name]
        if type(value) in _PLAIN or isinstance(value, torch.dtype):
            return ["value", value]
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
            return ["array", torch.from_numpy(numpy.array(value, value.dtype.newbyteorder("="), order="C"))]
        if isinstance(value, torch.Generator):
            return ["generator", value.get_state()]
        if depth > _DEEPEST:
            raise _NotKeptError
        if isinstance(value, dict):
            return ["dict", [[self._write(key, depth + 1), self._write(one, depth + 1)] for key, one in value.items()]]
        if type(value) in (list, tuple, deque):
            return [type(value).__name__, [self._write(one, depth + 1) for one in value]]
        raise _NotKeptError

    def _restored(self, now: Any, written: list[Any]) -> Any:  # noqa: PLR0911 - a case for each type
        """Return a value with its saved content, in the same object where possible."""
        kind, content = written
        if kind == "parameter":
            return self._parameters[content]
        if kind == "tensor":
            return self._restored_tensor(now, content)
        if kind == "array":
            if not isinstance(now, numpy.ndarray) or now.shape != tuple(content.shape):
                return content.numpy().copy()
            now[...] = content.numpy()
            return now
        if kind == "generator":
            return (now or torch.Generator()).set_state(content.cpu())
        if kind == "dict":
            old = dict(now) if isinstance(now, dict) else {}
            keys = [self._restored(None, key) for key, _ in content]
            new = {key: self._restored(old.get(key), one) for key, (_, one) in zip(keys, content, strict=True)}
            if not isinstance(now, dict):
                return new
            now.clear()
            now.update(new)
            return now
        if kind in _SEQUENCES:
            olds = [*now] if isinstance(now, list | tuple | deque) else []
            olds += [None] * (len(content) - len(olds))
            values = [self._restored(old, one) for old, one in zip(olds, content, strict=False)]
            if isinstance(now, list | deque) and type(now) is _SEQUENCES[kind]:
                now.clear()
                now.extend(values)
                return now
            return _SEQUENCES[kind](values)
        return content

    def _restored_tensor(self, now: Any, content: torch.Tensor) -> torch.Tensor:
        alike = isinstance(now, torch.Tensor) and now.shape == content.shape and now.dtype == content.dtype
        if alike and id(now) not in self._names:
            with torch.no_grad():
                now.copy_(content)
            kept: torch.Tensor = now
            return kept
        example = now if isinstance(now, torch.Tensor) else next(iter(self._parameters.values()))
        return content.to(example.device if content.ndim else content.device, copy=True)


def _is_owner(value: Any) -> bool:
    """Return whether a value is an optimizer, or an object of a user class (no module, container or callable)."""
    if isinstance(value, Optimizer):
        return True
    others = nn.Module, torch.Tensor, type, dict, list, tuple, deque, LRScheduler
    return (
        hasattr(value, "__dict__") and not (isinstance(value, others) or callable(value)) and is_user_class(type(value))
    )


def _has_tensors(written: list[Any]) -> bool:
    kind, content = written
    if kind in ("tensor", "array"):
        return True
    if kind == "dict":
        return any(_has_tensors(one) for _, one in content)
    return kind in _SEQUENCES and any(map(_has_tensors, content))


def check_own_tensors(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], strategy: str) -> None:
    """Raise InputError if an optimizer has tensors of its own and not every worker makes every update."""
    for name in OwnValues(optimizer, parameters).tensors:
        raise InputError(_NOT_OF_ALL.format(what="The optimizer keeps tensors", name=name, strategy=strategy))


def refuse_change(before: dict[str, Any], after: dict[str, Any], strategy: str) -> None:
    """Raise InputError if an update has changed an optimizer's own values while servers hold copies of it."""
    for name, value in after.items():
        if not same(before.get(name), value):
            raise InputError(_NOT_OF_ALL.format(what="The update has changed a value", name=name, strategy=strategy))


def refuse_counters(before: list[dict[str, Any]], after: list[dict[str, Any]], kind: str) -> None:
    """Raise InputError if the update of a replica has changed a parameter group, which all replicas share."""
    for was, now in zip(before, after, strict=True):
        for key, value in now.items():
            if not same(was.get(key), value):
                raise InputError(
                    f"{kind} changes {key!r} in its parameter groups with each update. All replicas of a worker share "
                    f"the groups, so the result would depend on the number of workers. Use an optimizer that counts in "
                    f"its state, as those of torch.optim do, or strategy 'allreduce'."
                )
