"""Detection of loop code that reads values which a forward pass has set on the model.

::

    step                               the loop body
    ├ close                            ├ float(model.last): the warning names it, once
    ├ forward passes set model.last    ╵
    └ end_step: open ──────────────────

The value comes from the last microbatch that this worker has computed. In a pipeline, it is stale on a worker without
the layer. A descriptor on the class detects reads. Only attributes that a forward pass sets get a descriptor.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, ValuesView
from itertools import islice
from types import FrameType
from typing import Any, NoReturn

import numpy
import torch

from paceline.data.objects.values import OF_MODULES
from paceline.system.torch_internals import CALLS, COMPILED_CALL, PARAMETERS
from paceline.system.user_code import is_user_code, user_line

_ABSENT = object()
_NEVER_DEPEND = torch.device, torch.dtype, str
_MOST_SEEN = 100
_ENOUGH = 2
_HEAP_TYPE = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: the class is not a static type in C, so it can be changed."""
_CURE = (
    "Let the loss or forward return it, as (loss, {{{key!r}: value}}): report.metrics has the mean over the batch, the "
    "same on all workers. What the model keeps from step to step belongs in a buffer (register_buffer)."
)
_LAST_MICROBATCH = (
    "The loop reads {name} ({line}), which the forward pass sets. The value is that of the last microbatch this worker "
    "computed, so the result depends on the number of workers. "
)
_NOT_HERE = (
    "The loop reads {name} ({line}), which the forward pass sets. This worker has not run that forward pass since it "
    "started: another worker computes this layer or these microbatches. The value is stale. "
)


class ForwardValues:
    """Detector of reads in the loop body of values that forward passes have set.

    Values that are the same in all steps, such as shapes, cause no warning.

    Args:
        objects: modules and other objects that a forward pass may change, by name.

    Attributes:
        left: names of the attributes that a forward pass sets, found by a probe of the pass on any worker.
        tell: callback for warnings.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.left: dict[str, None] = {}
        self.tell: Callable[[str], None] = lambda text: None
        self._objects = {name: one for name, one in objects.items() if isinstance(getattr(one, "__dict__", None), dict)}
        if any(map(_is_compiled, objects.values())):
            self._objects = {}  # a descriptor would stop the compiler
        self._steps: dict[str, int] = {}  # number of steps in which this worker changed an attribute, at most 2
        self._watched: dict[tuple[int, str], str] = {}
        self._told: set[tuple[str, str]] = set()  # by key, because layers of a class share their keys
        self._fresh: set[tuple[int, str]] = set()  # attributes that the loop itself has set since the step
        self._descriptors: dict[tuple[type, str], _Descriptor] = {}
        self._found = False
        self._is_open = False

    def find_left(self, owner: str, keys: Iterable[Any]) -> None:
        """Record the attributes that a probe of the forward pass has changed."""
        if owner in self._objects:
            self.load(f"{owner}.{key}" for key in keys)

    def load(self, left: Iterable[str]) -> None:
        """Add the names in :attr:`left` of another worker or a checkpoint."""
        self.left.update(dict.fromkeys(left))
        self._found = True

    def find_changed(self, owner: str, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
        """Record the attributes that a step has changed."""
        if owner not in self._objects:
            return
        for key, value in after.items():
            if key in OF_MODULES or (then := before.get(key)) is value:
                continue
            name = f"{owner}.{key}"
            count = self._steps.get(name, 0)
            if count < _ENOUGH and then != value:
                self._steps[name] = count + 1
                self._found = True

    def begin(self) -> None:
        """Start to detect reads after a step has returned."""
        self._fresh.clear()
        self.open()

    def open(self) -> None:
        """Detect reads from now on, because the loop body continues."""
        self._is_open = True
        if self._found:
            self._found = False
            self._watch()

    def _watch(self) -> None:
        """Watch attributes that two steps, or only other workers, have changed. A single change may set a constant."""
        for name in {**self.left, **self._steps}:
            owner, _, key = name.rpartition(".")
            one = self._objects.get(owner)
            if one is None or _is_computed_weight(one, key) or not _may_replace(type(one), key):
                continue
            if self._steps.get(name) == 1:
                self._watched.pop((id(one), key), None)
                continue
            self._watched[id(one), key] = name
            if (type(one), key) not in self._descriptors:
                self._descriptors[type(one), key] = _Descriptor(self, type(one), key)

    def close(self) -> None:
        """Ignore reads from now on, because the session is running."""
        self._is_open = False

    def end(self) -> None:
        """Remove all descriptors from the classes."""
        self._is_open = False
        for one in self._descriptors.values():
            one.remove()
        self._descriptors, self._objects = {}, {}

    def set_by_loop(self, one: object, key: str) -> None:
        """Record that the loop has set an attribute, so that reads of it cause no warning in this step."""
        if self._is_open:
            self._fresh.add((id(one), key))

    def read(self, one: object, key: str, value: object, frame: FrameType) -> None:
        """Warn if the loop reads a watched value. Called for each read of an attribute with a descriptor."""
        name = self._watched.get((id(one), key)) if self._is_open else None
        if name is None or (id(one), key) in self._fresh:
            return
        text = _LAST_MICROBATCH if name in self._steps else _NOT_HERE
        if (key, text) in self._told or not (_may_depend(value) or (value is None and text is _NOT_HERE)):
            return
        if is_user_code(frame.f_code.co_filename) and not _is_in_a_forward_pass(frame):
            self._told.add((key, text))
            self.tell(text.format(name=name, line=user_line(frame)) + _CURE.format(key=key))


class _Descriptor:
    """Descriptor that replaces an attribute on a class and reports reads by instances."""

    def __init__(self, values: ForwardValues, kind: type, key: str) -> None:
        self._values, self._kind, self._key = values, kind, key
        self._default = getattr(kind, key, _ABSENT)
        self._own = vars(kind).get(key, _ABSENT)
        setattr(kind, key, self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the class's own default instead of the descriptor, for a class that is pickled by value."""
        return (_Unset, ()) if self._default is _ABSENT else (copy.copy, (self._default,))

    def remove(self) -> None:
        """Restore what the class had under this name."""
        if vars(self._kind).get(self._key) is not self:
            return
        if self._own is _ABSENT:
            delattr(self._kind, self._key)
        else:
            setattr(self._kind, self._key, self._own)

    def __get__(self, one: Any, kind: type | None = None) -> Any:
        value = self._default if one is None else vars(one).get(self._key, self._default)
        if value is _ABSENT:
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {self._key!r}")
        if one is not None:
            self._values.read(one, self._key, value, sys._getframe(1))
        return value

    def __set__(self, one: Any, value: Any) -> None:
        vars(one)[self._key] = value
        self._values.set_by_loop(one, self._key)

    def __delete__(self, one: Any) -> None:
        if self._key not in vars(one):
            raise AttributeError(self._key)
        del vars(one)[self._key]


class _Unset:
    """Descriptor of an attribute without a class default, in another process."""

    def __get__(self, one: object, kind: type | None = None) -> NoReturn:
        raise AttributeError("the attribute is not set")


def _may_replace(kind: type, key: str) -> bool:
    """Return whether the class can be changed and has no descriptor of its own for this attribute."""
    if not kind.__flags__ & _HEAP_TYPE or issubclass(kind, torch.jit.ScriptModule):
        return False
    held = next((vars(one)[key] for one in kind.__mro__ if key in vars(one)), None)
    return isinstance(held, _Descriptor) or not hasattr(type(held), "__get__")


def _is_computed_weight(one: object, key: str) -> bool:
    """Return whether a hook computes an attribute from parameters, as pruning and weight or spectral norm do."""
    return any(name.startswith(f"{key}_") for name in vars(one).get(PARAMETERS, ()))


def _is_compiled(one: object) -> bool:
    return getattr(one, COMPILED_CALL, None) is not None or type(one).__name__ == "OptimizedModule"


def _may_depend(value: object) -> bool:
    """Return whether a value may depend on the samples. Devices and lists of sizes do not, even if created again."""
    if isinstance(value, torch.Tensor | numpy.ndarray | float | int | complex | numpy.generic):
        return True
    if isinstance(value, _NEVER_DEPEND) or callable(value):
        return False
    held = value.values() if isinstance(value, dict) else value
    if isinstance(held, list | tuple | set | frozenset | deque | ValuesView):
        return any(not isinstance(one, int) and _may_depend(one) for one in islice(held, _MOST_SEEN))
    entries = getattr(value, "__dict__", None)
    return isinstance(entries, dict) and any(isinstance(one, torch.Tensor) for one in entries.values())


def _is_in_a_forward_pass(frame: FrameType | None) -> bool:
    """Return whether a module call is on the stack. A read in a forward pass is not a read by the loop."""
    while frame is not None:
        if frame.f_code.co_name in CALLS:
            return True
        frame = frame.f_back
    return False
