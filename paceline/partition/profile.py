"""What each layer of a model costs, measured on one microbatch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from paceline.data.keys import kept_states
from paceline.partition.base import Crossing, Layers, Stage
from paceline.partition.preserve import untouched
from paceline.schedule.balance import LayerCost

REPEATS = 9


def measure(
    model: nn.Module,
    layers: Layers,
    example: Any,
    loss: Callable[[Any], torch.Tensor],
    repeats: int = REPEATS,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[LayerCost]:
    """The median cost of each layer, after a pass that is not counted; the model stays as it was.

    Args:
        model: the model.
        layers: its layers.
        example: its input for one microbatch.
        loss: of its output; a scalar. Its time is the last layer's.
        repeats: how often each layer is measured.
        precision: the context of the forward pass, such as autocast.
    """
    count = len(layers.names)
    probes = [_Probe(layers.stage(place, place + 1), precision) for place in range(count)]
    probes[-1].loss = loss
    with untouched(model), kept_states(), _without_gradients(model), torch.enable_grad():
        _fill(probes, example)
        kept = [probe.kept_bytes(model) for probe in probes]
        for _ in range(repeats):
            for probe in probes:
                probe.run()
    parameters = dict(model.named_parameters())
    return [
        LayerCost(
            name=name,
            forward=median(probe.forward),
            backward=median(probe.backward),
            output_bytes=sum(tensor.nbytes for tensor in probe.sent),
            parameter_bytes=sum(parameters[held].nbytes for held in probe.stage.parameters),
            kept_bytes=bytes_kept,
        )
        for name, probe, bytes_kept in zip(layers.names, probes, kept, strict=True)
    ]


class _Probe:
    """One layer: what enters it, what gradients come back, and the times that it took."""

    def __init__(self, stage: Stage, precision: Callable[[], AbstractContextManager[object]]) -> None:
        self.stage = stage
        self.loss: Callable[[Any], torch.Tensor] | None = None
        self.entered: Any = None
        self.sent: Crossing = ()
        self.returned: list[torch.Tensor | None] = []
        self.forward: list[float] = []
        self.backward: list[float] = []
        self._precision = precision

    def compute(self) -> Crossing:
        """The forward pass; of the last layer the loss, too."""
        with self._precision():
            output = self.stage(self.entered)
            made: Crossing = output if self.loss is None else (self.loss(output),)
        return made

    def go_back(self, made: Crossing) -> None:
        """The backward pass."""
        gradients = self.returned if self.loss is None else [None]
        pairs = [pair for pair in zip(made, gradients, strict=True) if pair[0].requires_grad]
        pairs = [pair for pair in pairs if self.loss is not None or pair[1] is not None]
        if pairs:
            torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])

    def run(self) -> None:
        """Measure once."""
        begin = _now()
        made = self.compute()
        middle = _now()
        self.go_back(made)
        self.forward.append(middle - begin)
        self.backward.append(_now() - middle)

    def kept_bytes(self, model: nn.Module) -> int:
        """What stays in memory from the forward to the backward pass, besides parameters and buffers."""
        of_model = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        kept = {
            _storage(leaf): leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(self.entered)
            if isinstance(leaf, torch.Tensor)
        }

        def note(tensor: torch.Tensor) -> torch.Tensor:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # an operation that keeps its own output would else keep itself for ever

        with saved_tensors_hooks(note, lambda tensor: tensor):
            made = self.compute()
        del made
        return sum(size for place, size in kept.items() if place not in of_model)


def _fill(probes: list[_Probe], example: Any) -> None:
    """One pass forward and back, which leaves with each layer what enters it and what gradients come back."""
    made: list[Crossing] = []
    entering = example
    for probe in probes:
        probe.entered = entering
        made.append(probe.compute())
        if probe.loss is None:
            probe.sent = tuple(tensor.detach() for tensor in made[-1])
            entering = tuple(tensor.requires_grad_(tensor.is_floating_point()) for tensor in probe.sent)
    for place in reversed(range(len(probes))):
        probes[place].go_back(made[place])
        if place:
            probes[place - 1].returned = [tensor.grad for tensor in probes[place].entered]


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
