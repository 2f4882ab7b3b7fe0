"""Carries out the operations of one worker of a pipeline (``schedule.operations``) for one step.

What a forward pass needs for its backward pass is kept from one to the other. A stage that another worker holds is
reached through a channel, one of this worker through a dictionary. Along with the values between stages go the states
of the random generators, so that a model that is cut draws the same numbers as one that is not; but not behind stages
that have drawn none so far, which without exact bits are only looked at during the first step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.comm.links.channel import Receiver, Sender
from paceline.data.feed import Piece
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
from paceline.schedule.operations import Kind, Operation
from paceline.step.checks import refused_as_sparse
from paceline.step.forward import computed_again, on_copy, pair_of, sum_and_count
from paceline.step.job import Job
from paceline.strategies.pipeline.links import Links
from paceline.strategies.pipeline.split_backward import backward_of_input, backward_of_weights

Crossing: TypeAlias = "list[torch.Tensor | None]"
"""What goes over a border.

First what the strategy tells the next stage (:meth:`Hooks.tell`), or nothing; upwards then the states of the
generators, or nothing for each of them, and the values; downwards the gradients for the values.
"""

_AHEAD = 4
"""So many operations ahead this worker makes room for what it will receive."""


@dataclass(frozen=True)
class Held:
    """A stage that this worker holds.

    Attributes:
        call: its forward pass.
        trained: the names of the parameters that it trains.
        buffers: the names of its buffers.
    """

    call: Callable[[Any], Any]
    trained: Sequence[str]
    buffers: frozenset[str]


class Hooks:
    """What a strategy does with the operations; this one updates nothing."""

    def tell(self, microbatch: int, upwards: bool) -> torch.Tensor | None:
        """What goes along with the values of a microbatch to the next stage, always of the same shape; or nothing."""
        return None

    def hear(self, microbatch: int, upwards: bool, told: torch.Tensor) -> None:
        """What came along with the values of a microbatch."""

    def worker_of(self, stage: int, microbatch: int) -> int:
        """The rank that computes a stage for a microbatch."""
        raise NotImplementedError

    def gave(self, stage: int, microbatch: int) -> None:
        """The gradients of a microbatch are in the ``.grad`` of the parameters of a stage: take them."""
        raise NotImplementedError

    def weights(self, operation: Operation) -> AbstractContextManager[object]:
        """A context in which the parameters have the version of an operation."""
        return nullcontext()

    def reduce(self, operation: Operation) -> None:
        """Bring together the gradients of the workers that hold a stage."""

    def update(self, operation: Operation) -> None:
        """Update the weights of a stage."""


@dataclass
class Passed:
    """What a forward pass leaves for the backward pass."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] | None = None
    halves: Any = None


class Executor:
    """Carries out operations.

    Microbatches are numbered since the pipeline was last empty.

    Args:
        job: what is trained.
        held: the stages of this worker.
        last: the number of the last stage.
        hooks: what the strategy does with operations.

    Attributes:
        pairs: for each microbatch whose last stage this worker computed a float64 tensor of shape [2]: the sum of the
            losses and what it is to be divided by.
        statistics: for each stage and microbatch what the forward pass made of the stage's buffers, times the samples.
        samples: of each microbatch.
        busy: seconds that this worker has computed.
    """

    def __init__(self, job: Job, held: Mapping[int, Held], last: int, hooks: Hooks) -> None:
        self._job = job
        self._held = held
        self._last = last
        self._hooks = hooks
        self._ways = Links(job, last)
        self._states = len(pack_generators())
        self._drawing: set[int] = set()
        self._watched = {stage for stage in held if stage != last}
        self._do = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._backward_input,
            Kind.WEIGHT: self._backward_weight,
            Kind.SEND: self._send,
            Kind.RECEIVE: self._receive,
            Kind.REDUCE: hooks.reduce,
            Kind.UPDATE: hooks.update,
        }
        self.clear()

    def clear(self) -> None:
        """The pipeline is empty: nothing is under way."""
        self._data: dict[int, Any] = {}
        self._origins: dict[int, tuple[int, int]] = {}
        self._passed: dict[tuple[int, int], Passed] = {}
        self._upwards: dict[tuple[int, int], Crossing] = {}
        self._downwards: dict[tuple[int, int], Crossing] = {}
        self.samples: dict[int, int] = {}
        self.busy = 0.0
        self.pairs: dict[int, torch.Tensor] = {}
        self.statistics: dict[int, dict[int, dict[str, torch.Tensor]]] = {stage: {} for stage in self._held}

    def enter(self, step: int, pieces: Sequence[Piece], first: int = 0, scale: float = 1.0) -> None:
        """Let the microbatches of a step in.

        Args:
            step: its number.
            pieces: the single microbatches of it that this worker has loaded.
            first: the number of its first microbatch.
            scale: what the gradients are multiplied with, from the loss on.
        """
        self._scale = scale
        for piece in pieces:
            self._data[first + piece.microbatches.start] = piece.data
        rank = self._job.world.rank
        for microbatch, part in enumerate(self._job.order.parts_of(step)):
            number = first + microbatch
            if any(self._hooks.worker_of(stage, number) == rank for stage in self._held):
                self.samples[number] = len(part)
                self._origins[number] = step, microbatch

    def origin(self, microbatch: int) -> tuple[int, int]:
        """The step of a microbatch, and its number in the batch."""
        return self._origins[microbatch]

    def forget(self, microbatch: int) -> None:
        """What is known of a microbatch that has gone through this worker."""
        self._data.pop(microbatch, None)
        self._origins.pop(microbatch, None)
        self.samples.pop(microbatch, None)
        self.pairs.pop(microbatch, None)
        for stage in self._held:
            self.statistics[stage].pop(microbatch, None)

    def run(self, operations: Sequence[Operation]) -> None:
        """Carry out operations of a step, in order.

        Raises:
            InputError: values between stages are not what they were.
            WorkerLost: another worker is gone or silent.
        """
        expected = 0
        for place, operation in enumerate(operations):
            while expected < min(len(operations), place + _AHEAD):
                if operations[expected].kind is Kind.RECEIVE:
                    self._inlet(operations[expected]).expect(self.samples[operations[expected].microbatch])
                expected += 1
            self._job.world.check()
            begin = time.perf_counter()
            size = self._do[operation.kind](operation)
            seconds = time.perf_counter() - begin
            self.busy += seconds if operation.peer < 0 else 0.0
            self._record(operation, seconds, size)
        if not self._job.settings.exact:
            self._watched.clear()

    def forget_forms(self) -> None:
        """With nothing under way: what goes over a border may be of other forms than before."""
        self._ways.forget()

    def finish(self) -> None:
        """Wait until all has been sent."""
        self._ways.finish()

    def _record(self, operation: Operation, seconds: float, size: int | None) -> None:
        kind, stage, microbatch, version, peer = operation
        more: dict[str, int | None] = {"bytes": size, "peer": peer} if peer >= 0 else {"version": version}
        if microbatch >= 0:
            more["step"], more["microbatch"] = self._origins[microbatch]
        self._job.events.mark(kind.name.lower(), stage=stage, seconds=seconds, **more)

    def _forward(self, operation: Operation) -> None:
        stage, microbatch = operation.stage, operation.microbatch
        compute, held, place = self._job.compute, self._held[stage], (stage, microbatch)
        states, values = self._entering(stage, microbatch)
        compute.buffers.reset()
        if states is None:
            seed_all(seed_of(STEP, self._job.settings.seed, *self._origins[microbatch]))
        else:
            unpack_generators(states)
        before = generator_states() if stage in self._watched else None
        passed = self._passed[place] = Passed([*values] if stage > 0 else [])
        call = partial(held.call, values)
        if self._job.settings.pipeline.recompute:
            contexts = partial(computed_again, compute.buffers, held.buffers)
            again = partial(on_copy, held.call) if stage == 0 else held.call
            call = partial(checkpoint, again, values, use_reentrant=False, context_fn=contexts)
        with self._hooks.weights(operation), compute.keeping_weights():
            if stage == self._last:
                passed.outputs = [self._loss(microbatch, call)]
            else:
                with compute.precision():
                    passed.outputs = list(call())
                if states is not None or (before is not None and not same_states(before, generator_states())):
                    self._drawing.add(stage)
                    self._watched.discard(stage)
                packed: Crossing = [*pack_generators()] if stage in self._drawing else [None] * self._states
                self._upwards[place] = [self._hooks.tell(microbatch, True), *packed, *passed.outputs]
        made = compute.buffers.collect(self.samples[microbatch], held.buffers)
        self.statistics[stage][microbatch] = dict(zip(compute.buffers.names_in(held.buffers), made, strict=True))

    def _entering(self, stage: int, microbatch: int) -> tuple[list[torch.Tensor] | None, Any]:
        """The generators' states, if anything was drawn before, and the values that a forward pass starts from."""
        if stage == 0:
            return None, pair_of(self._data[microbatch])[0]
        told, *crossing = self._upwards.pop((stage - 1, microbatch))
        if told is not None:
            self._hooks.hear(microbatch, True, told)
        states = [state for state in crossing[: self._states] if state is not None]
        values = tuple(
            value.detach().requires_grad_(value.requires_grad)
            for value in crossing[self._states :]
            if value is not None
        )
        return states or None, values

    def _loss(self, microbatch: int, call: Callable[[], Any]) -> torch.Tensor:
        compute, samples = self._job.compute, self.samples[microbatch]

        def model(features: Any) -> Any:
            return call()

        with compute.precision():
            value = compute.forward(cast(nn.Module, model), self._data[microbatch])
        total, count = sum_and_count(value, samples)
        if not total.requires_grad:
            raise InputError("The loss does not depend on any parameter that requires a gradient.")
        counted = torch.as_tensor(count, dtype=torch.float64, device=total.device)
        self.pairs[microbatch] = torch.stack((total.detach().double(), counted))
        return total if self._scale == 1.0 else total * self._scale

    def _backward(self, operation: Operation) -> None:
        passed = self._ready(operation)
        with self._hooks.weights(operation):
            self._whole_backward(passed)
        self._leave(operation, passed)
        self._hooks.gave(operation.stage, operation.microbatch)

    def _backward_input(self, operation: Operation) -> None:
        passed = self._ready(operation)
        self._passed[operation.stage, operation.microbatch] = passed
        if operation.stage > 0:
            weights = self._weights(operation.stage)
            passed.halves = backward_of_input(passed.outputs, passed.gradients, passed.inputs, weights)
            passed.outputs, passed.gradients = [], None
            self._leave(operation, passed)

    def _backward_weight(self, operation: Operation) -> None:
        passed = self._passed.pop((operation.stage, operation.microbatch))
        if operation.stage == 0:
            self._whole_backward(passed)
        else:
            backward_of_weights(self._weights(operation.stage), passed.halves)
        self._hooks.gave(operation.stage, operation.microbatch)

    def _weights(self, stage: int) -> list[nn.Parameter]:
        return [self._job.update.parameters[name] for name in self._held[stage].trained]

    def _ready(self, operation: Operation) -> Passed:
        """What the forward pass left, with the gradients for its outputs."""
        stage, microbatch = operation.stage, operation.microbatch
        passed = self._passed.pop((stage, microbatch))
        if stage < self._last:
            told, *passed.gradients = self._downwards.pop((stage + 1, microbatch))
            if told is not None:
                self._hooks.hear(microbatch, False, told)
        return passed

    def _whole_backward(self, passed: Passed) -> None:
        given: Sequence[torch.Tensor | None] = [None] if passed.gradients is None else passed.gradients
        pairs = [
            (value, gradient)
            for value, gradient in zip(passed.outputs, given, strict=True)
            if value.requires_grad and (gradient is not None or passed.gradients is None)
        ]
        kept: dict[int, torch.Tensor] = {}
        for place, value in enumerate(passed.inputs):
            if value.requires_grad:
                value.register_hook(partial(_keep, kept, place, value.is_contiguous()))
        if pairs:
            torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
        for place, gradient in kept.items():
            passed.inputs[place].grad = gradient

    def _leave(self, operation: Operation, passed: Passed) -> None:
        """The gradients for the inputs, for the stage before."""
        if operation.stage > 0:
            told = self._hooks.tell(operation.microbatch, False)
            gradients = [value.grad for value in passed.inputs]
            if any(value is not None and value.is_sparse for value in gradients):
                raise refused_as_sparse(f"The output of stage {operation.stage - 1} gets")
            self._downwards[operation.stage, operation.microbatch] = [told, *gradients]

    def _send(self, operation: Operation) -> int:
        stage, microbatch, peer = operation.stage, operation.microbatch, operation.peer
        crossing = (self._upwards if peer > stage else self._downwards).pop((stage, microbatch))
        return self._outlet(operation).send(self.samples[microbatch], crossing)

    def _receive(self, operation: Operation) -> int:
        stage, microbatch, peer = operation.stage, operation.microbatch, operation.peer
        crossing = self._inlet(operation).take()
        (self._upwards if peer < stage else self._downwards)[peer, microbatch] = crossing
        return sum(value.numel() * value.element_size() for value in crossing if value is not None)

    def _outlet(self, operation: Operation) -> Sender:
        stage, peer = operation.stage, operation.peer
        return self._ways.outlet(stage, peer, self._hooks.worker_of(peer, operation.microbatch))

    def _inlet(self, operation: Operation) -> Receiver:
        stage, peer = operation.stage, operation.peer
        return self._ways.inlet(stage, peer, self._hooks.worker_of(peer, operation.microbatch))


def _keep(kept: dict[int, torch.Tensor], place: int, contiguous: bool, gradient: torch.Tensor) -> None:
    """Keep a gradient as it lies in memory; what goes into ``.grad`` is laid out like the value."""
    if not (contiguous and gradient.is_contiguous()):
        kept[place] = gradient
