"""Measured costs of the layers of a model on one microbatch."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.data.feed import MicrobatchGroup
from paceline.partition.backward import backward
from paceline.partition.base import Activations, Layers, Stage
from paceline.partition.preserve import kept_gradients, preserved
from paceline.schedule.balance import LayerCost
from paceline.step.forward import ForwardRunner
from paceline.system.torch_internals import tree_leaves

REPEATS = 9


def measure(
    model: nn.Module,
    layers: Layers,
    example: Any,
    loss: Callable[[Any], torch.Tensor],
    repeats: int = REPEATS,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[LayerCost]:
    """Return the median costs of each layer after a warm-up pass, without a change to the model.

    Args:
        loss: function of the model's output that returns a scalar. Its time counts for the last layer.
        precision: context of the forward pass, such as autocast.
    """
    last = len(layers.names) - 1
    probes = [
        _Probe(layers.stage(place, place + 1), loss if place == last else None, precision) for place in range(last + 1)
    ]
    with preserved(model), kept_gradients(model), torch.enable_grad():
        _warm_up(probes, example)
        kept = [probe.kept_bytes(model) for probe in probes]
        for _ in range(repeats):
            for probe in probes:
                probe.measure()
    parameters = dict(model.named_parameters())
    return [
        LayerCost(
            name=name,
            forward=median(probe.forward_seconds),
            backward=median(probe.backward_seconds),
            output_bytes=sum(tensor.nbytes for tensor in probe.outputs),
            parameter_bytes=sum(parameters[own].nbytes for own in probe.stage.parameters),
            kept_bytes=bytes_kept,
        )
        for name, probe, bytes_kept in zip(layers.names, probes, kept, strict=True)
    ]


def measure_layers(
    compute: ForwardRunner, layers: Layers, group: MicrobatchGroup, repeats: int = REPEATS
) -> list[LayerCost]:
    """Return the costs from :func:`measure` for a microbatch, with the loss and the precision of the training."""

    def loss(output: Any) -> torch.Tensor:
        return compute.loss_of(group, model=lambda _: output)[0]

    return measure(compute.model, layers, compute.input_of(group), loss, repeats, compute.precision)


class _Probe:
    """Layer with its inputs, the gradients of its outputs, and its measured times.

    ``loss``: loss function of the last layer, otherwise None. ``outputs``: empty for the last layer.
    """

    def __init__(
        self,
        stage: Stage,
        loss: Callable[[Any], torch.Tensor] | None,
        precision: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.stage, self.loss = stage, loss
        self.inputs: Any = None
        self.outputs: Activations = ()
        self.output_gradients: list[torch.Tensor | None] = []
        self.forward_seconds: list[float] = []
        self.backward_seconds: list[float] = []
        self._precision = precision

    def forward(self) -> Activations:
        """Return the outputs, or the loss for the last layer."""
        with self._precision():
            output = self.stage(self.inputs)
            result: Activations = output if self.loss is None else (self.loss(output),)
        return result

    def backward(self, outputs: Activations) -> None:
        """Run the backward pass."""
        backward(outputs, self.output_gradients if self.loss is None else None, ())

    def measure(self) -> None:
        """Time one forward and one backward pass."""
        begin = seconds_now()
        outputs = self.forward()
        middle = seconds_now()
        self.backward(outputs)
        self.forward_seconds.append(middle - begin)
        self.backward_seconds.append(seconds_now() - middle)

    def kept_bytes(self, model: nn.Module) -> int:
        """Return the bytes kept from the forward to the backward pass, besides parameters and buffers."""
        of_model = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        kept = {
            _storage(leaf): leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(self.inputs)
            if isinstance(leaf, torch.Tensor)
        }

        def record(tensor: torch.Tensor) -> torch.Tensor:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # otherwise an operation that saves its own output would keep itself alive

        with saved_tensors_hooks(record, lambda tensor: tensor):
            outputs = self.forward()
        del outputs
        return sum(size for storage, size in kept.items() if storage not in of_model)


def _warm_up(probes: list[_Probe], example: Any) -> None:
    """Run one forward and backward pass, which gives each layer its inputs and the gradients of its outputs."""
    results: list[Activations] = []
    inputs = example
    for probe in probes:
        probe.inputs = inputs
        results.append(probe.forward())
        if probe.loss is None:
            probe.outputs = tuple(tensor.detach() for tensor in results[-1])
            inputs = tuple(tensor.requires_grad_(tensor.is_floating_point()) for tensor in probe.outputs)
    for place in reversed(range(len(probes))):
        probes[place].backward(results[place])
        if place:
            probes[place - 1].output_gradients = [tensor.grad for tensor in probes[place].inputs]


def seconds_now() -> float:
    """Return the time after all operations so far, including those of the GPU, in seconds."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
