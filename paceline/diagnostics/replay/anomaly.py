"""Search for the sample and the layer in which a microbatch's first NaN or infinite value arises.

::

    forward     a ─ b ─ c ✗        c: the first module whose output is not finite, inner modules before outer ones.
                a ─ b ✗ (log) ─ c  Not finite before c: the module around b and c has computed the value.
    backward    a ✗ b ─ c          b: the innermost module whose input gets a gradient that is not finite.

torch's anomaly mode then names the operation of the backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.data.feed import MicrobatchGroup
from paceline.data.nested import rows, tensors_in
from paceline.step.context import TrainingContext
from paceline.step.probes.probe import without_trace

Finding = dict[str, object]


def single(group: MicrobatchGroup, at: int) -> MicrobatchGroup:
    return MicrobatchGroup(group.microbatches, 1, rows(group.data, at, at + 1))


def find_anomaly(context: TrainingContext, step: int, group: MicrobatchGroup) -> list[Finding]:
    """Return the layer and samples in which a value first is not finite. Empty if all values are finite."""
    (microbatch,) = group.microbatches
    numbers = context.order.microbatches_of(step)[microbatch]
    watch = _watched(context, step, group)
    if watch.layer is None:
        return []
    if watch.phase == "parameters":
        return [{"pass": watch.phase, "layer": watch.layer, "microbatch": microbatch, "samples": [], "operation": ""}]
    places = _rows_of(watch.value, len(numbers))
    if not places:  # the value has another first dimension: compute each sample alone
        places = [at for at in range(len(numbers)) if _is_bad_alone(context, step, single(group, at))]
    return [
        {
            "pass": watch.phase,
            "layer": watch.layer,
            "microbatch": microbatch,
            "samples": [numbers[at] for at in places] or numbers,
            "operation": _operation(context, step, group) if watch.phase == "backward" else "",
        }
    ]


def _watched(context: TrainingContext, step: int, group: MicrobatchGroup) -> _Watch:
    """Compute a microbatch with hooks on all modules, and return the hooks."""
    model = context.compute.model
    watch = _Watch(model)
    for name, parameter in model.named_parameters():
        watch.see("parameters", name, parameter)
    for value in tensors_in(group.data):
        watch.see("data", "", value)
    with without_trace(context), watch.hooked():
        _compute(context, step, group, watch)
    return watch


def _compute(context: TrainingContext, step: int, group: MicrobatchGroup, watch: _Watch | None = None) -> None:
    for parameter in context.compute.model.parameters():
        parameter.grad = None
    result = context.compute.forward_pass(group, step)
    if watch is not None:
        watch.see("forward", "the loss", result.pair[:2])
    if watch is None or watch.layer is None:
        result.total.backward()


def _is_bad_alone(context: TrainingContext, step: int, sample: MicrobatchGroup) -> bool:
    try:
        return _watched(context, step, sample).layer is not None
    except Exception:  # noqa: BLE001 - a model may not accept a single sample
        return False


def _operation(context: TrainingContext, step: int, group: MicrobatchGroup) -> str:
    """Return the error of anomaly mode, and the line of the forward pass. Empty if the gradients are only infinite."""
    with warnings.catch_warnings(record=True) as caught, without_trace(context):
        warnings.simplefilter("always")
        try:
            with torch.autograd.set_detect_anomaly(True):
                _compute(context, step, group)
        except RuntimeError as error:
            lines = [line.strip() for one in caught for line in str(one.message).splitlines() if 'File "' in line]
            own = [line for line in lines if "/torch/" not in line and "/paceline/" not in line]
            return " ".join([str(error), *own[-1:]])
    return ""


def _is_finite(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex()) or bool(value.detach().isfinite().all())


def _rows_of(value: torch.Tensor | None, samples: int) -> list[int]:
    """Return the samples in which a value is not finite. Empty if its first dimension is not the sample dimension."""
    if value is None or value.ndim == 0 or value.shape[0] != samples:
        return []
    bad = ~value.isfinite().reshape(samples, -1).all(dim=1)
    return [int(at) for at in bad.nonzero().flatten().tolist()]


class _Watch:
    """Hooks on all modules, which remember the first value that is not finite.

    Attributes:
        layer: module that has computed the value, or that gets the data first. None while all values are finite.
        phase: parameters, data, forward or backward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._modules = dict(model.named_modules())
        self._hooks: list[Any] = []
        self._inputs: dict[int, tuple[str, Any, torch.Tensor]] = {}  # kept, so that no other tensor gets its id
        self._reached = False  # whether the innermost module that gets the data first is known
        self.layer: str | None = None
        self.phase = ""
        self.value: torch.Tensor | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Return a context with hooks on all modules."""
        for module in self._names:
            self._hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._after))
        try:
            yield
        finally:
            for hook in self._hooks:
                hook.remove()
            self._inputs.clear()

    def see(self, phase: str, layer: str, value: torch.Tensor) -> None:
        """Remember a value if it is the first one that is not finite."""
        if self.layer is None and not _is_finite(value):
            self.phase, self.layer, self.value = phase, layer, value.detach()

    def _shown(self, name: str) -> str:
        kind = type(self._modules[name]).__name__
        return f"{name} ({kind})" if name else kind

    def _before(self, module: nn.Module, given: Any, named: Any) -> None:
        name = self._names[module]
        around = self._shown(name.rpartition(".")[0]) if name else "the forward function"
        gets_data = self.phase == "data" and not all(map(_is_finite, tensors_in((given, named))))
        if gets_data and not self._reached:  # each inner module replaces the outer one, down to one without children
            self.layer, self._reached = self._shown(name), not list(module.children())
        for value in tensors_in((given, named)):
            self.see("forward", f"{around}, before {self._shown(name)}", value)
            if value.requires_grad:
                outer, hook, _ = self._inputs.get(id(value), (None, None, None))
                if hook is not None and (outer == "" or name.startswith(f"{outer}.")):
                    hook.remove()  # the gradient comes from the inner module
                self._inputs[id(value)] = name, self._watch_gradient(value, name), value

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        name = self._names[module]
        for value in tensors_in(output):
            self.see("forward", self._shown(name), value)
        for parameter in module.parameters(recurse=False):  # an input without a gradient shows nothing
            if parameter.requires_grad:
                self._hooks.append(self._watch_gradient(parameter, name))

    def _watch_gradient(self, value: torch.Tensor, name: str) -> Any:
        return value.register_hook(partial(self.see, "backward", self._shown(name)))
