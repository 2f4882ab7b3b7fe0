"""Interception of a forward pass: the calls of layers, and the operations between them.

A layer is intercepted at ``COMPILED_CALL``, which a module runs in place of itself and its hooks; an operation in
a ``TorchFunctionMode``; a custom ``autograd.Function``, which no mode sees, at a method put below its ``apply``. Calls
inside a layer are not intercepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode

from paceline.system.torch_internals import COMPILED_CALL, call_of, current_function_mode, without_innermost_mode

_BELOW = Function.__mro__[1]


class Watch(ABC):
    """Handlers for the calls of layers and the operations between them."""

    def __init__(self) -> None:
        self._inside = False
        self._mode: _Mode | None = None

    @abstractmethod
    def on_layer(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run instead of a call of a layer."""

    @abstractmethod
    def on_operation(self, function: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run instead of an operation between layers; ``function`` identifies the operation."""

    @contextmanager
    def watching(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Intercept the forward pass that runs in the context."""
        before = {name: module.__dict__.get(COMPILED_CALL) for name, module in layers.items()}
        for name, module in layers.items():
            module.__dict__[COMPILED_CALL] = partial(self._layer, name, before[name] or call_of(module))
        _BELOW.apply = classmethod(partial(_apply, self))  # type: ignore[attr-defined]
        self._mode = _Mode(self)
        try:
            with self._mode:
                yield
        finally:
            self._mode = None  # a reference cycle would keep the tensors of the pass alive until garbage collection
            del _BELOW.apply  # type: ignore[attr-defined]
            for name, module in layers.items():
                module.__dict__[COMPILED_CALL] = before[name]
                if before[name] is None:
                    del module.__dict__[COMPILED_CALL]

    def _layer(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._intercept(self.on_layer, name, call, args, kwargs)

    def _intercept(
        self, handle: Callable[..., Any], about: Any, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a handler instead of a call, unless the call is inside of another one that is intercepted."""
        if self._inside:
            return call(*args, **kwargs)
        self._inside = True
        try:
            with without_innermost_mode() if current_function_mode() is self._mode else nullcontext():
                return handle(about, call, args, kwargs)
        finally:
            self._inside = False


class _Mode(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watch._intercept(self._watch.on_operation, function, function, args, kwargs or {})


def _apply(watch: Watch, cls: type, *args: Any, **kwargs: Any) -> Any:
    return watch._intercept(watch.on_operation, cls, super(_BELOW, cls).apply, args, kwargs)  # type: ignore[arg-type]
