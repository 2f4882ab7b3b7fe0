"""Audits in pipelines: a stage computes a microbatch a second time, right after its backward pass.

No other worker may hold the same weights, and only then does this worker have the right version of them. Between the
two computations lie the forward pass itself and everything that the worker has computed since::

    stage 0    F0 F1 F2 F3 B0 B1 B2 b2 B3       microbatch 2 is audited: b2 is its forward and its backward pass
    stage 1       F0 F1 F2 F3 B0 B1 B2 b2 B3    once more, from the inputs and gradients that the stage has received
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import preserve_generators
from paceline.data.objects.attributes import Attributes, same
from paceline.errors import InputError
from paceline.partition.backward import backward
from paceline.step.context import TrainingContext
from paceline.step.forward import computed_again
from paceline.step.probes.audit import tell, text_of
from paceline.step.probes.digests import DATA, Digests, Found, difference
from paceline.step.probes.kept import kept_attributes, kept_text, other_values
from paceline.step.probes.repeatability import moved
from paceline.strategies.pipeline.stages import LocalStage


def audits_of(
    context: TrainingContext,
    step: int,
    first: int,  # number of the first microbatch of the step
    stages: Mapping[int, LocalStage],
    last: int,
    worker_of: Callable[[int, int], int],  # function that returns the rank that computes a stage for a microbatch
    data: Mapping[int, Any],
) -> dict[tuple[int, int], StageAudit]:
    """Return the audits of a step on this worker, by stage and microbatch."""
    if not context.audits.is_audited(step):
        return {}
    microbatch = context.audits.microbatch(step, len(context.order.parts_of(step)))
    number = first + microbatch
    return {
        (stage, number): StageAudit(context, step, microbatch, stage, local, stage == last, data.get(number))
        for stage, local in stages.items()
        if worker_of(stage, number) == context.world.rank
    }


class StageAudit:
    """Audit of a microbatch, which a stage computes twice."""

    def __init__(
        self,
        context: TrainingContext,
        step: int,
        microbatch: int,  # index of the microbatch in the step
        stage: int,
        local: LocalStage,
        is_last: bool,  # whether the output of the stage is the loss
        data: Any,  # microbatch as this worker has loaded it, or None. It is loaded a second time.
    ) -> None:
        self._context = context
        self._step, self._microbatch = step, microbatch
        self._parameters = {name: context.update.parameters[name] for name in local.trained}
        self._stage, self._is_last, self._buffers, self._kept = stage, is_last, local.buffers, local.kept
        self._passes = Digests(bool(context.settings.exact)), Digests(bool(context.settings.exact))
        self._data: Any = None
        self._inputs: list[torch.Tensor] = []
        # received gradients of the outputs. None if the output is the loss.
        self.output_gradients: list[torch.Tensor | None] | None = None
        if data is not None:
            self._data = self._load().data
            for digests, loaded in zip(self._passes, (data, self._data), strict=True):
                digests.add_data(loaded)

    def _load(self) -> MicrobatchGroup:
        (group,) = self._context.feed.load(self._step, [range(self._microbatch, self._microbatch + 1)])
        return group

    def begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy the inputs, and save the state from which the forward pass starts.

        The copy waits for inputs that are still on their way. Digests of outputs that are views of them do not wait.
        """
        self._inputs = [value.detach().clone() for value in inputs]
        self._before = self._attributes()
        _, self._as_before = computed_again(self._context.compute.buffers, self._buffers)

    def _attributes(self) -> Attributes:
        compute = self._context.compute
        known = {id(value) for value in [*compute.model.parameters(), *compute.model.buffers()]}
        return Attributes({"model": compute.model, "forward": compute.forward}, known)

    def add_forward(self, outputs: Sequence[torch.Tensor], again: bool = False) -> None:
        """Add the digests of the outputs, or of the loss, and of the buffers after a forward pass."""
        for place, value in enumerate(outputs):
            self._passes[again].add("the loss" if self._is_last else f"output {place} of stage {self._stage}", value)
        buffers = self._context.compute.buffers
        for name, (_, _, value) in zip(buffers.names_in(self._buffers), buffers.copies(self._buffers), strict=True):
            self._passes[again].add(f"the buffer {name!r}", value)

    @contextmanager
    def backward(self, inputs: Sequence[torch.Tensor], again: bool = False) -> Iterator[None]:
        """Add the digests of the gradients that the backward pass in the context computes for this microbatch."""
        kept = {name: value.grad for name, value in self._parameters.items()}
        for value in self._parameters.values():
            value.grad = None
        try:
            yield
            for name, value in self._parameters.items():
                if value.grad is not None:
                    self._passes[again].add(f"the gradient of {name!r}", value.grad)
            for place, one in enumerate(inputs):
                if one.grad is not None:
                    self._passes[again].add(f"the gradient of input {place} of stage {self._stage}", one.grad)
        finally:
            for name, value in self._parameters.items():
                if (before := kept[name]) is not None:
                    value.grad = before if again or value.grad is None else before.add_(value.grad)
                elif again:
                    value.grad = None

    def compute_again(self, outputs_of: Callable[[Sequence[torch.Tensor], Any], list[torch.Tensor]]) -> None:
        """Compute the stage a second time from the same inputs, without side effects.

        Args:
            outputs_of: function that computes the outputs of the stage from its inputs and the data.

        Raises:
            WorkerLost: the results differ, and another worker was lost: the received gradients may be garbage.
        """
        context, begin = self._context, time.perf_counter()
        between = self._attributes()
        inputs = tuple(value.requires_grad_(value.is_floating_point()) for value in self._inputs)
        try:
            with preserve_generators(), self._as_before:
                outputs = outputs_of(inputs, self._data)
                self.add_forward(outputs, again=True)
                with self.backward(inputs, again=True):
                    backward(outputs, self.output_gradients, inputs)
            name = self._difference()
            cause = moved(self._before, between, self._attributes()) if name else []
            read = "" if name else self._value_read(inputs, outputs, outputs_of)
        finally:
            between.put_back()
        seconds = time.perf_counter() - begin
        context.events.mark("audit", step=self._step, microbatch=self._microbatch, seconds=seconds)
        if name or read:
            context.world.synchronize()  # after a loss, received tensors may have changed between the two computations
        told = (name == DATA) in context.probe_results.told
        if name and not told:
            context.probe_results.told.add(name == DATA)
            by = f"twice by rank {context.world.rank}"
            tell(context, text_of(self._step, self._microbatch, by, name, ", ".join(cause[:3])))
        if read:
            raise InputError(f"Audit of step {self._step}: {kept_text(context, read)}")

    def _value_read(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        outputs_of: Callable[[Sequence[torch.Tensor], Any], list[torch.Tensor]],
    ) -> str:
        """Return the name of a value kept by another stage's forward pass, if the loss depends on it; otherwise ''."""
        if not self._is_last:
            return ""
        others = [name for name in self._context.compute.buffers.agreed if name not in self._buffers]
        tensors = {f"the buffer {name!r}": self._context.compute.model.get_buffer(name) for name in others}
        attributes = kept_attributes(self._context)
        tensors |= {name: value for name, value in attributes.tensors.items() if name in self._kept}
        numbers = {name: entry for name, entry in attributes.numbers().items() if name in self._kept}

        def changes_loss(*names: str) -> bool:
            copies = {name: tensors[name].detach().clone() for name in names if name in tensors}
            before = {name: numbers[name][0][numbers[name][1]] for name in names if name in numbers}
            for name, value in copies.items():
                tensors[name].data.copy_(other_values(value))
            for name, number in before.items():
                entries, key = numbers[name]
                entries[key] = number + 1
            try:
                with preserve_generators(), self._as_before:
                    again = outputs_of(inputs, self._data)
            finally:
                for name, value in copies.items():
                    tensors[name].data.copy_(value)
                for name, number in before.items():
                    entries, key = numbers[name]
                    entries[key] = number
            return not same([*outputs], again)

        names = [*tensors, *numbers]
        return next(filter(changes_loss, names), "") if names and changes_loss(*names) else ""

    def _difference(self) -> str:
        found: list[tuple[int, Found]] = [(self._context.world.rank, digests.found()) for digests in self._passes]
        return difference(found)[0]
