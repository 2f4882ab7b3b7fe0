"""The gradients of data parallel training on their way out."""

from __future__ import annotations

import torch
from torch import nn

from paceline.comm.reduction.bucketed import BucketedReduction
from paceline.comm.reduction.shared_memory import reduction_for
from paceline.comm.step_header import StepHeader
from paceline.errors import InputError
from paceline.schedule.tree import Node
from paceline.step.accumulate import Accumulator, Values, add_one
from paceline.step.checks import check_dense
from paceline.step.job import Job

_GRADIENT_TAGS = 1 << 12


class Reducer:
    """The gradients on their way out: each leaves as soon as the last microbatch has given its part.

    Call ``begin``, ``push`` after the backward pass of each microbatch but the last, ``last`` before that of the last,
    ``written`` and ``finish`` after it.
    """

    def __init__(self, job: Job, named: dict[str, nn.Parameter], exchange: BucketedReduction | None = None) -> None:
        self._names = list(named)
        self._parameters = parameters = list(named.values())
        self._exchange = exchange or reduction_for(
            job.world, [value.detach() for value in reversed(parameters)], job.events, "gradients", _GRADIENT_TAGS
        )
        self._armed = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, place=place: self._ready(place))
            for place, parameter in enumerate(parameters)
        ]

    def begin(self, nodes: list[list[Node]], exact: bool) -> None:
        """Start a step; ``nodes`` are what each rank will send."""
        self._armed = False
        self._nodes = nodes
        self._sums = Accumulator(exact)
        self._missing: list[list[int]] = []
        self._kept: list[Values] = []
        self._nearest: list[Values] = []
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        """Do nothing more, and let go of everything."""
        self._armed = False
        for hook in self._hooks:
            hook.remove()

    def push(self, microbatch: int) -> None:
        """Take the gradients of a microbatch that is not the last."""
        values: Values = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        check_dense(self._names, values)
        self._missing.append([place for place, value in enumerate(values) if value is None])
        self._sums.push(microbatch, values)

    def last(self, microbatch: int, header: StepHeader) -> None:
        """From now on gradients leave while they are computed."""
        self._kept, self._nearest = self._sums.before_last(microbatch)
        self._exchange.begin(self._nodes, header.count, header.check)
        self._waiting = set(range(len(self._parameters)))
        self._armed = True

    def at_once(self, nodes: list[list[Node]], sums: list[Values], header: StepHeader) -> None:
        """Send sums that are complete already; ``nodes`` are what each rank sends, ``sums`` are of this worker's."""
        self._exchange.begin(nodes, header.count, header.check)
        for place in reversed(range(len(self._parameters))):
            for slot, values in zip(self._exchange.slots(self._member(place)), sums, strict=True):
                if add_one(values[place], None, slot) is None:
                    slot.fill_(-0.0)  # what changes nothing when added, not even the sign of a zero
            self._exchange.written(self._member(place))

    def nothing(self, header: StepHeader) -> None:
        """This worker has no microbatch in this step; it still adds up its part of the others' gradients."""
        self._exchange.begin(self._nodes, header.count, header.check)
        for member in range(len(self._parameters)):
            self._exchange.written(member)

    def written(self) -> list[list[int]]:
        """The backward pass of the last microbatch has ended: what it gave no gradient to leaves, too.

        Returns:
            for each microbatch the places of the parameters to which it gave no gradient.
        """
        if self._armed:
            self._armed = False
            unused = sorted(self._waiting)
            self._missing.append(unused)
            for place in reversed(unused):
                self._write(place, None)
        return self._missing

    def finish(self) -> None:
        """Wait for the means and put them into ``.grad``."""
        self._exchange.finish()
        for place, parameter in enumerate(self._parameters):
            parameter.grad = self._exchange.mean(self._member(place))

    def _member(self, place: int) -> int:
        return len(self._parameters) - 1 - place

    def _ready(self, place: int) -> None:
        if self._armed:
            if place not in self._waiting:
                raise InputError(
                    f"The parameter {self._names[place]!r} got its gradient in two parts in one backward pass, as in "
                    f"reentrant checkpointing of a shared layer. Use checkpoint(..., use_reentrant=False)."
                )
            gradient = self._parameters[place].grad
            self._parameters[place].grad = None
            check_dense([self._names[place]], [gradient])
            self._waiting.discard(place)
            self._write(place, gradient)

    def _write(self, place: int, gradient: torch.Tensor | None) -> None:
        """Add the gradient of the last microbatch to the sums before it, and hand all sums over."""
        slots = self._exchange.slots(self._member(place))
        for slot, values in zip(slots, self._kept, strict=False):
            if add_one(values[place], None, slot) is None:
                slot.fill_(-0.0)
        for values in self._nearest[:-1]:
            before = values[place]
            gradient = gradient if before is None else add_one(before, gradient, before)
        before = self._nearest[-1][place] if self._nearest else None
        if add_one(before, gradient, slots[-1]) is None:
            slots[-1].fill_(-0.0)
        self._exchange.written(self._member(place))
