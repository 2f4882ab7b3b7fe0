"""Executor of the operations of one pipeline worker (``schedule.pipeline.operations``) for one step.

Channels connect a stage to stages on other workers, a dictionary to stages on the same worker. Activations travel with
the states of the random generators, so that a model in stages draws the same numbers as an uncut model. The states are
left out if neither this stage nor an earlier stage has drawn; without ``exact`` only the first step is observed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import (
    STEP,
    generator_states,
    pack_generators,
    same_states,
    seed_all,
    seed_of,
    unpack_generators,
)
from paceline.errors import InputError
from paceline.partition.backward import backward
from paceline.schedule.pipeline.operations import Kind, Operation
from paceline.step.checks import sparse_gradients
from paceline.step.context import TrainingContext
from paceline.step.forward import NO_GRADIENT, computed_again, name_call, on_copy
from paceline.strategies.pipeline.audit import StageAudit, audits_of
from paceline.strategies.pipeline.links import Links
from paceline.strategies.pipeline.split_backward import SplitBackward, backward_input, backward_weight
from paceline.strategies.pipeline.stages import LocalStage

Payload: TypeAlias = "list[torch.Tensor | None]"
"""Tensors that a stage sends to the next or the previous stage.

The first is the attachment of the strategy (:meth:`Hooks.attach`). Forward, the states of the generators follow (or
None for each of them), then the activations; backward, the gradients of the activations follow.
"""

_FIRST_PASS = {Kind.FORWARD: "encode", Kind.SEND: "encode-send", Kind.RECEIVE: "encode-receive"}
"""Names of events in the first pass of a loss over the whole batch."""
_PREFETCH = 4  # number of operations ahead for which receives are posted


class Hooks:
    """Callbacks of a strategy into the executor."""

    def on_gradients(self, stage: int, microbatch: int) -> None:
        """Take the gradients of a microbatch from the ``.grad`` of a stage's parameters."""
        raise NotImplementedError

    def weights(self, operation: Operation) -> AbstractContextManager[object]:
        """Return a context in which the parameters have the version of an operation."""
        return nullcontext()

    def update(self, operation: Operation) -> None:
        """Update the weights of a stage."""

    def attach(self, microbatch: int, forward: bool) -> torch.Tensor | None:
        """Return a tensor to send with activations (``forward``) or gradients, always of the same shape, or None."""
        return None

    def on_attachment(self, microbatch: int, forward: bool, attachment: torch.Tensor) -> None:
        """Take the tensor that arrived with activations or gradients."""


@dataclass
class Saved:
    """Tensors that a forward pass saves for the backward pass, and generator states that its inputs came with."""

    states: list[torch.Tensor] = field(default_factory=list)
    inputs: Sequence[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    output_gradients: list[torch.Tensor | None] | None = None
    split: SplitBackward = field(default_factory=SplitBackward)


class Executor:
    """Executor of pipeline operations.

    Microbatches are numbered from the last time that the pipeline was empty.

    Args:
        workers_of: for each stage of the model, the ranks that hold it.

    Attributes:
        losses: for each microbatch whose last stage this worker computed, a float64 tensor of shape [2 + 2 * metrics]:
            the sum of the losses and its divisor, then the same pair for each metric.
        statistics: for each stage and microbatch, the stage's buffers after the forward pass, times the samples.
        busy_seconds: compute time of this worker.
    """

    def __init__(
        self, context: TrainingContext, stages: Mapping[int, LocalStage], workers_of: Sequence[Sequence[int]]
    ) -> None:
        self._context, self._stages = context, stages
        self._last = len(workers_of) - 1
        self._states = len(pack_generators())
        self._links = Links(context, workers_of)
        self._random: set[int] = set()
        """Stages that have drawn random numbers, or that follow a stage that has."""
        self._silent: set[int] = set()
        """Stages that have sent activations and have not drawn before."""
        self._observed = {stage for stage in stages if stage != self._last}
        """Stages that have not drawn yet, but still may."""
        self._run = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._backward_input,
            Kind.WEIGHT: self._backward_weight,
            Kind.SEND: self._send,
            Kind.RECEIVE: self._receive,
            Kind.UPDATE: self._update,
        }
        self.reset()

    def reset(self) -> None:
        """Forget all microbatches, when the pipeline is empty."""
        self._data: dict[int, Any] = {}
        self._origins: dict[int, tuple[int, int]] = {}
        self._saved: dict[tuple[int, int], Saved] = {}
        self._activations: dict[tuple[int, int], Payload] = {}
        self._gradients: dict[tuple[int, int], Payload] = {}
        self._audits: dict[tuple[int, int], StageAudit] = {}
        self.samples: dict[int, int] = {}
        self.busy_seconds = 0.0
        self.losses: dict[int, torch.Tensor] = {}
        self.statistics: dict[int, dict[int, dict[str, torch.Tensor]]] = {stage: {} for stage in self._stages}

    def add(
        self,
        step: int,
        groups: Sequence[MicrobatchGroup],  # single microbatches of the step that this worker has loaded
        worker_of: Callable[[int, int], int],  # function that returns the rank that computes a stage for a microbatch
        first: int = 0,
        scale: float = 1.0,  # factor of the loss, and so of the gradients
        audits: bool = True,  # whether audits may be due
    ) -> None:
        self._scale = scale
        self._worker_of = worker_of
        for group in groups:
            self._data[first + group.microbatches.start] = group.data
        rank = self._context.world.rank
        for microbatch, part in enumerate(self._context.order.parts_of(step)):
            number = first + microbatch
            if any(self._worker_of(stage, number) == rank for stage in self._stages):
                self.samples[number] = len(part)
                self._origins[number] = step, microbatch
        if audits:
            self._audits |= audits_of(self._context, step, first, self._stages, self._last, worker_of, self._data)

    def origin(self, microbatch: int) -> tuple[int, int]:
        """Return the step of a microbatch, and its index in the batch."""
        return self._origins[microbatch]

    def forget(self, microbatch: int) -> None:
        """Forget a microbatch that has left this worker."""
        self._data.pop(microbatch, None)
        self._origins.pop(microbatch, None)
        self.samples.pop(microbatch, None)
        self.losses.pop(microbatch, None)
        for stage in self._stages:
            self.statistics[stage].pop(microbatch, None)

    def run(self, operations: Sequence[Operation], hooks: Hooks, keeps: bool = True) -> None:
        """Run operations on the added microbatches, in order.

        Args:
            keeps: whether forward passes keep what backward passes need.

        Raises:
            InputError: activations have another shape or type than before.
        """
        self._hooks, self._keeps = hooks, keeps
        posted = 0
        for place, operation in enumerate(operations):
            while posted < min(len(operations), place + _PREFETCH):
                _, stage, microbatch, _, peer = ahead = operations[posted]
                if ahead.kind is Kind.RECEIVE:
                    rank = self._worker_of(peer, microbatch)
                    self._links.receiver(stage, peer, rank).expect(self.samples[microbatch])
                posted += 1
            self._context.world.check()
            at, begin = time.time(), time.perf_counter()
            size = self._run[operation.kind](operation)
            seconds = time.perf_counter() - begin
            self.busy_seconds += seconds if operation.peer < 0 else 0.0
            self._record(operation, at, seconds, size)
        if not self._context.settings.exact:
            self._observed.clear()

    def reset_links(self) -> None:
        """Allow activations to have different shapes or types from now on. Nothing may be in flight."""
        self._silent.clear()
        self._links.reset()

    def finish(self) -> None:
        """Wait until everything has been sent."""
        self._links.finish()

    def _record(self, operation: Operation, at: float, seconds: float, size: int | None) -> None:
        kind, stage, microbatch, version, peer = operation
        more: dict[str, float | None] = {"bytes": size, "peer": peer} if peer >= 0 else {"version": version}
        if kind is Kind.SEND:  # it begins before its receive ends, even if this thread pauses before the record
            more["time"] = at + seconds
        if microbatch >= 0:
            more["step"], more["microbatch"] = self._origins[microbatch]
        else:
            more["step"] = None
        name = kind.name.lower() if self._keeps else _FIRST_PASS[kind]
        self._context.events.mark(name, stage=stage, seconds=seconds, **more)

    def _forward(self, operation: Operation) -> None:
        stage, microbatch = operation.stage, operation.microbatch
        compute, local, key = self._context.compute, self._stages[stage], (stage, microbatch)
        compute.buffers.reset()
        seed_all(seed_of(STEP, self._context.settings.seed, *self._origins[microbatch]))
        saved = self._received(stage, microbatch)
        if saved.states and stage < self._last:
            unpack_generators(saved.states)
        before = generator_states() if stage in self._observed else None
        if (audit := self._audits.get(key)) is not None:
            audit.begin(saved.inputs)
        call = local.forward
        if local.recompute:
            contexts = partial(computed_again, compute.buffers, local.buffers)
            again = partial(on_copy, local.forward) if stage == 0 else local.forward
            call = partial(checkpoint, again, use_reentrant=False, context_fn=contexts)
        with self._hooks.weights(operation):
            saved.outputs, pair = self._outputs(stage, microbatch, call, saved, self._data.get(microbatch))
            if pair is not None:
                self.losses[microbatch] = pair
            else:
                if saved.states or (before is not None and not same_states(before, generator_states())):
                    self._check_draws(stage, microbatch)
                    self._random.add(stage)
                    self._observed.discard(stage)
                elif stage in self._observed:
                    self._silent.add(stage)
                packed: Payload = [*pack_generators()] if stage in self._random else [None] * self._states
                self._activations[key] = [self._hooks.attach(microbatch, forward=True), *packed, *saved.outputs]
        if audit is not None:
            audit.add_forward(saved.outputs)
        if self._keeps:
            self._saved[key] = saved
        elif stage < self._last:  # drop the graph, even if the next stage is on this worker
            self._activations[key][1 + self._states :] = [_detached(value) for value in saved.outputs]
        whole = self._context.order.samples_of(self._origins[microbatch][0])
        changed = compute.buffers.collect(self.samples[microbatch], whole, local.buffers)
        self.statistics[stage][microbatch] = dict(zip(compute.buffers.names_in(local.buffers), changed, strict=True))

    def _check_draws(self, stage: int, microbatch: int) -> None:
        """Raise InputError if a stage draws random numbers after it has sent activations without generator states."""
        if stage in self._silent:
            raise InputError(
                f"Stage {stage} draws random numbers in step {self._origins[microbatch][0]}, but did not in the first "
                f"microbatch, after which the stages agreed on their messages. Let it draw from the first microbatch "
                f"on, such as by a dropout of at least 1e-6, or use strategy 'allreduce'."
            )

    def _received(self, stage: int, microbatch: int) -> Saved:
        """Return the inputs of a forward pass, and the generator states if a stage has drawn before."""
        if stage == 0:
            return Saved()
        attachment, *payload = self._activations.pop((stage - 1, microbatch))
        if attachment is not None:
            self._hooks.on_attachment(microbatch, forward=True, attachment=attachment)
        states = [state for state in payload[: self._states] if state is not None]
        values = payload[self._states :]
        return Saved(states, [_detached(value) for value in values if value is not None])

    def _outputs(
        self, stage: int, microbatch: int, call: Callable[[Any], Any], saved: Saved, data: Any
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return the outputs of a stage; for the last stage, the loss, and the sums and counts of loss and metrics.

        The first stage runs the forward pass of the script up to the call of the model, the last stage all of it.
        """
        compute, (step, index) = self._context.compute, self._origins[microbatch]
        group = MicrobatchGroup(range(index, index + 1), self.samples[microbatch], data)

        def model(given: Any) -> Any:
            if saved.states:
                unpack_generators(saved.states)
            return call(tuple(saved.inputs) if stage > 0 else given)

        if stage < self._last:
            values = tuple(saved.inputs) if stage > 0 else compute.input_of(group, step)
            with compute.keeping_weights(), compute.precision():
                try:
                    return list(call(values)), None
                except Exception as error:
                    name_call(error, group.microbatches, group.samples, step)
                    raise
        total, pair = compute.loss_of(group, step, model)
        if not total.requires_grad:
            raise InputError(NO_GRADIENT)
        return [total if self._scale == 1.0 else total * self._scale], pair

    def _backward(self, operation: Operation) -> None:
        saved = self._take_saved(operation)
        with self._hooks.weights(operation), self._audited(operation, saved):
            backward(saved.outputs, saved.output_gradients, saved.inputs)
        self._pass_gradients(operation, saved)
        self._compute_again(operation, saved)
        self._hooks.on_gradients(operation.stage, operation.microbatch)

    def _audited(self, operation: Operation, saved: Saved) -> AbstractContextManager[object]:
        audit = self._audits.get((operation.stage, operation.microbatch))
        return nullcontext() if audit is None else audit.backward(saved.inputs)

    def _compute_again(self, operation: Operation, saved: Saved) -> None:
        """Compute a microbatch of an audited step a second time, right after the first."""
        stage, microbatch = operation.stage, operation.microbatch
        if (audit := self._audits.pop((stage, microbatch), None)) is None:
            return
        forward = self._stages[stage].forward
        with self._hooks.weights(operation):
            audit.compute_again(
                lambda inputs, data: self._outputs(stage, microbatch, forward, Saved(saved.states, inputs), data)[0]
            )

    def _backward_input(self, operation: Operation) -> None:
        saved = self._take_saved(operation)
        self._saved[operation.stage, operation.microbatch] = saved
        if operation.stage > 0:
            weights = self._weights(operation.stage)
            saved.split = backward_input(saved.outputs, saved.output_gradients, saved.inputs, weights)
            saved.outputs, saved.output_gradients = [], None
            self._pass_gradients(operation, saved)

    def _backward_weight(self, operation: Operation) -> None:
        saved = self._saved.pop((operation.stage, operation.microbatch))
        with self._audited(operation, saved):
            if operation.stage == 0:
                backward(saved.outputs, saved.output_gradients, saved.inputs)
            else:
                backward_weight(self._weights(operation.stage), saved.split)
        self._compute_again(operation, saved)
        self._hooks.on_gradients(operation.stage, operation.microbatch)

    def _weights(self, stage: int) -> list[nn.Parameter]:
        return [self._context.update.parameters[name] for name in self._stages[stage].trained]

    def _take_saved(self, operation: Operation) -> Saved:
        """Return the values that the forward pass saved, with the gradients of its outputs."""
        stage, microbatch = operation.stage, operation.microbatch
        saved = self._saved.pop((stage, microbatch))
        if stage < self._last:
            attachment, *saved.output_gradients = self._gradients.pop((stage + 1, microbatch))
            if attachment is not None:
                self._hooks.on_attachment(microbatch, forward=False, attachment=attachment)
        if (audit := self._audits.get((stage, microbatch))) is not None and saved.output_gradients is not None:
            audit.output_gradients = [None if value is None else value.clone() for value in saved.output_gradients]
        return saved

    def _pass_gradients(self, operation: Operation, saved: Saved) -> None:
        """Keep the gradients of the inputs ready for the previous stage."""
        if operation.stage > 0:
            attachment = self._hooks.attach(operation.microbatch, forward=False)
            gradients = [value.grad for value in saved.inputs]
            if any(value is not None and value.is_sparse for value in gradients):
                raise sparse_gradients(f"The output of stage {operation.stage - 1} gets")
            self._gradients[operation.stage, operation.microbatch] = [attachment, *gradients]

    def _send(self, operation: Operation) -> int:
        _, stage, microbatch, _, peer = operation
        forward = peer > stage
        payload = (self._activations if forward else self._gradients).pop((stage, microbatch))
        sender = self._links.sender(stage, peer, self._worker_of(peer, microbatch))
        states = range(1, 1 + self._states) if forward else range(0)
        return sender.send(self.samples[microbatch], payload, host=states)

    def _receive(self, operation: Operation) -> int:
        _, stage, microbatch, _, peer = operation
        payload = self._links.receiver(stage, peer, self._worker_of(peer, microbatch)).take()
        (self._activations if peer < stage else self._gradients)[peer, microbatch] = payload
        return sum(value.numel() * value.element_size() for value in payload if value is not None)

    def _update(self, operation: Operation) -> None:
        self._hooks.update(operation)


def _detached(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(value.requires_grad)
