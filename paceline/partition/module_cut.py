"""Cut of any model at the calls of its modules: a stage runs the model's own forward pass, without the other layers.

See :mod:`paceline.partition.recording` and :mod:`paceline.partition.replay`. Nothing is traced, so all numbers are the
model's own, gradients included. Operations between two layers belong to the first of them. Every tensor that is
computed before a boundary and used after it crosses the boundary. Shapes are recorded for two numbers of samples, and
are linear in the number of samples.

Layers are merged if a cut between them would separate two tensors that share memory changed later, or a module from its
own state.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
from torch import nn

from paceline.data.nested import map_leaves, tensors_in
from paceline.errors import InputError
from paceline.partition.base import Layers, Stage, tensor_names
from paceline.partition.flags import FlagValues, training_flags
from paceline.partition.layers import layer_modules
from paceline.partition.preserve import preserved
from paceline.partition.recording import Record, Recorder
from paceline.partition.replay import Replay, Section
from paceline.system.torch_internals import has_backward_hooks, tree_leaves


class ModuleCut(Layers):
    """Layers of a model. Each mode (training, evaluation) is recorded when it first occurs."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._example, self.model = example, model
        self.modules = layer_modules(model)
        self._training = training_flags(model)
        self._records: dict[FlagValues, Recorded] = {}
        self.tensor_names = [*tensor_names(model).values()]
        self.names = self.recorded().names

    def stage(self, begin: int, end: int) -> Stage:
        return _ModuleStage(self, begin, end)

    @property
    def is_ready(self) -> bool:
        return self._training.current() in self._records

    def prepare(self) -> None:
        if has_backward_hooks(self.model):
            raise InputError(
                f"The model {type(self.model).__name__!r} has a backward hook, which would see the gradients of one "
                f"stage at a time: register it on a layer of it."
            )
        self.recorded()

    def recorded(self) -> Recorded:
        mode = self._training.current()
        if mode not in self._records:
            self._records[mode] = recorded = Recorded(self.model, self.modules, self._example)
            if len(self._records) > 1 and recorded.names != self.names:
                raise InputError(
                    f"{type(self.model).__name__} does not have the layers with which it was cut, because modules went "
                    f"from training to evaluation or back. Then: {', '.join(self.names)}; now: "
                    f"{', '.join(recorded.names)}."
                )
        return self._records[mode]


class Recorded:
    """Recording of a model in one mode."""

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module], example: Any) -> None:
        self._model = type(model).__name__
        self._example = example
        with preserved(model), torch.enable_grad():
            self.changing = _changing_buffers(model, example)  # names of the buffers that change
        self.record = _record(model, modules, self.changing, example)  # record of a pass over the example
        self._other: Record | None = None
        with contextlib.suppress(Exception):  # the model may take one number of samples only
            other = _record(model, modules, self.changing, map_leaves(_doubled, example))
            self._other = other if self.record.same_path(other) else None
        calls = [call.name for call in self.record.calls] or [self._model]
        counts: Counter[str] = Counter()
        self.names = []  # names of the layers
        self.starts = []  # index of the call with which each layer begins, then the number of calls
        for place, name in enumerate(calls):
            counts[name] += 1
            if place == 0 or place not in self.record.forbidden:
                self.names.append(name if counts[name] == 1 else f"{name}:{counts[name]}")
                self.starts.append(place)
        self.starts.append(len(self.record.calls))

    def samples_of(self, numbers: list[int], tensors: list[torch.Tensor]) -> float:
        """Return the samples of a pass, as a multiple of the example's, from the shapes of some of its values."""
        for number, tensor in zip(numbers, tensors, strict=True):
            if self._other is None:
                break
            pairs = zip(self.record.values[number].shape, self._other.values[number].shape, tensor.shape, strict=False)
            for one, two, size in pairs:
                if one != two:
                    return 1 + (size - one) / (two - one)
        return 1.0

    def shape(self, number: int, samples: float) -> tuple[int, ...]:
        """Return the shape of a value for a number of samples, which is given as a multiple of the example's."""
        one = self.record.values[number].shape
        two = self._other.values[number].shape if self._other is not None else one
        return tuple(round(left + (right - left) * (samples - 1)) for left, right in zip(one, two, strict=True))

    def check_input(self, values: Any) -> float:
        """Raise if an input is unlike the example. Returns its samples as a multiple of the example's."""
        given, known = tree_leaves(values), tree_leaves(self._example)
        tensors = tensors_in(values)
        fits = len(given) == len(known)
        samples = self.samples_of(list(range(len(tensors))), tensors) if fits else 1.0
        number = 0
        for leaf, example in zip(given, known, strict=False):
            if not isinstance(example, torch.Tensor):
                fits &= bool(leaf == example)
                continue
            fits = fits and isinstance(leaf, torch.Tensor) and leaf.dtype == example.dtype
            fits = fits and leaf.shape == self.shape(number, samples)
            number += 1
        if not fits:
            remedy = (
                "may differ only in the number of samples: pad the samples to one size"
                if self._other is not None
                else "must be alike, because its forward depends on the number of samples: use drop_last"
            )
            raise InputError(
                f"{self._model} was cut with {_describe(self._example)}, but got {_describe(values)}. The inputs of a "
                f"model that is cut {remedy}."
            )
        return samples


class _ModuleStage(Stage):
    def __init__(self, layers: ModuleCut, begin: int, end: int) -> None:
        self._layers = layers
        self._bounds = begin, end
        self._sections: dict[int, Section] = {}
        own = self._section(layers.recorded()).own
        parameters = dict(layers.model.named_parameters())
        self.parameters = [name for name in layers.tensor_names if name in own and name in parameters]
        self.buffers = [name for name in layers.tensor_names if name in own and name not in parameters]

    def _section(self, recorded: Recorded) -> Section:
        if id(recorded) not in self._sections:
            first, last = (recorded.starts[place] for place in self._bounds)
            model, modules = self._layers.model, self._layers.modules
            self._sections[id(recorded)] = Section(model, modules, recorded.record, (first, last), recorded.changing)
        return self._sections[id(recorded)]

    def __call__(self, values: Any) -> Any:
        recorded = self._layers.recorded()
        section = self._section(recorded)
        if section.begin == 0:
            samples = recorded.check_input(values)
        else:
            samples = recorded.samples_of(section.received, list(values))
        replay = Replay(section, lambda number: recorded.shape(number, samples))
        if section.begin == 0:
            replay.accept(values)
        else:
            values = replay.receive(values)
        return replay.run(values)


def _record(model: nn.Module, modules: dict[str, nn.Module], changing: list[str], example: Any) -> Record:
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # otherwise layers would share the casts of a weight
    try:
        with preserved(model), torch.enable_grad():
            return Recorder(model, modules, changing).run(example)
    finally:
        torch.set_autocast_cache_enabled(cached)


def _changing_buffers(model: nn.Module, example: Any) -> list[str]:
    """Return the names of the buffers that a forward pass changes. The pass also fills the caches of the model."""
    before = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}
    model(map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, example))
    return [
        name
        for name, buffer in model.named_buffers()
        if name not in before or buffer is not before[name][0] or not torch.equal(buffer, before[name][1])
    ]


def _doubled(leaf: Any) -> Any:
    return torch.cat([leaf, leaf]) if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf


def _describe(values: Any) -> str:
    def one(leaf: Any) -> str:
        return (
            f"a tensor of shape {list(leaf.shape)} and {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        )

    return ", ".join(map(one, tree_leaves(values)))
