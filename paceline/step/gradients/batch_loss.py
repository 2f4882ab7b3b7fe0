"""Loss over the whole batch in two passes, as gradient caching does (Gao et al. 2021, GradCache, arXiv 2101.06983).

::

    first pass     microbatch 0   1   2   3      outputs only; each graph is dropped
                              │   │   │   │
                   loss(  [ rows 0 | 1 | 2 | 3 ], sums 0+1+2+3  ), and its gradient for the outputs
                              │   │   │   │
    second pass    microbatch 0   1   2   3      outputs again; loss of a microbatch: sum(outputs * gradient)

The losses of the second pass have the gradients of the loss over the batch, so the strategy adds them up like any other
losses. Both passes draw the same random numbers and begin with the same buffers. Parameters that the loss itself uses
get their gradient with microbatch 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import BATCH_LOSS, seed_all
from paceline.data.objects.attributes import Attributes, same
from paceline.errors import InputError, name_microbatches
from paceline.step.buffers import summable
from paceline.step.context import Batch
from paceline.step.forward import ForwardRunner
from paceline.step.gradients.outputs import OutputForm, Outputs, check_forms, outputs_of, spelled
from paceline.step.loss import Forward, check_names, loss_of_result
from paceline.step.probes.digests import TOLERANCE
from paceline.system.user_code import in_user_call

_NO_GRADIENT = (
    "batch_loss returned a loss that needs no gradient: it depends neither on an output of forward that requires one, "
    "nor on a parameter of the model. Look for .detach(), .item() or torch.no_grad() in forward and in batch_loss, and "
    "for parameters that are all frozen."
)
_NOT_AGAIN = (
    "forward does not repeat: {what} of {microbatch} in step {step} {how}. With batch_loss=, it computes a microbatch "
    "twice, once for the loss and once for the gradients. Draw random numbers from the global generators of "
    "torch, random or numpy, keep what forward changes in buffers of the model, and read neither a counter nor the "
    "clock."
)
_OWN_STATE = (
    "batch_loss called twice with the same outputs gives different results{named}. Every worker calls it in every "
    "step, and again if the step is repeated after a worker is lost. Draw random numbers from the global generators of "
    "torch, random or numpy, and keep nothing from call to call."
)
_BUFFER = (
    "batch_loss changes the buffer {name!r} of the model, as batch norm in training mode does. Run such layers in "
    "forward, and return their results to batch_loss as outputs."
)
_OUTSIDE = (
    "batch_loss uses a parameter of shape {shape} that the model does not have, so no optimizer of the session trains "
    "it. Register it in the model, as self.value = torch.nn.Parameter(...), and use it from there."
)

_CHUNK = 1 << 16  # values per pass of a digest, so that it needs little memory
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type that holds the bits of a value, by its size in bytes."""


class Plan(NamedTuple):
    """Values that the second pass of a step needs.

    ``rows``: rows of each microbatch in the outputs. ``gradients``: gradients of the outputs, times ``scale``.
    ``parameters``: parameters that the loss itself uses, with their gradients. ``pair``: as in :class:`ForwardResult`,
    for microbatch 0. ``marks``: digests of the outputs of each microbatch, instead of the outputs.
    """

    step: int
    rows: Sequence[range]
    forms: dict[str, OutputForm]
    gradients: dict[str, torch.Tensor | None]
    parameters: list[tuple[nn.Parameter, torch.Tensor]]
    pair: torch.Tensor
    scale: float
    marks: dict[int, dict[str, list[int | float]]]


class BatchLoss:
    """Loss over the whole batch: runs ``forward`` for the outputs, and gives each microbatch its loss.

    Args:
        forward: ``forward(model, microbatch)`` returns outputs (:func:`outputs_of`).
        exact: whether outputs must repeat bit by bit. Otherwise they may differ by rounding.
    """

    def __init__(self, forward: Forward, loss: Callable[[Any, Batch], Any], *, exact: bool) -> None:
        self._forward, self._loss = forward, loss
        self._exact = exact
        self._plan: Plan | None = None
        self._collect: Callable[[int, Outputs], None] | None = None
        self.compares = True  # whether outputs of the second pass are compared with those of the first

    def alone(self, model: nn.Module, data: Any) -> torch.Tensor:
        """Run the forward pass outside of a step. Returns zero, which depends on the outputs."""
        return 0.0 * _some_loss(outputs_of(self._forward(model, data), None))

    def encode(self, model: nn.Module, data: Any) -> Any:
        """Run the forward pass of a microbatch."""
        return self._forward(model, data)

    @contextmanager
    def first_pass(self, collect: Callable[[int, Outputs], None]) -> Iterator[None]:
        """Return a context in which microbatches have no loss, and ``collect`` gets their numbers and outputs."""
        self._collect = collect
        try:
            yield
        finally:
            self._collect = None

    def marks_of(self, outputs: Outputs) -> dict[str, list[int | float]]:
        """Return the digest of each output of a microbatch."""
        return {name: self._mark(value.detach()) for name, value in outputs.tensors.items()}

    def _mark(self, value: torch.Tensor) -> list[int | float]:
        """Return a digest that depends on the order of values, or norm and projection if values may be rounded."""
        value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        flat = value.resolve_neg().contiguous().view(-1)
        odd, wave = _weights(flat.device)
        if self._exact or not flat.is_floating_point():
            digest = torch.zeros((), dtype=torch.int64, device=flat.device)
            for part in flat.view(_WORDS[flat.element_size()]).split(_CHUNK):
                digest = 31 * digest + (part.long() * odd[: len(part)]).sum()
            return [int(digest)]
        projection = torch.zeros((), dtype=torch.float64, device=flat.device)
        for part in flat.split(_CHUNK):
            projection = (part * wave[: len(part)]).sum() - projection
        return [float(torch.linalg.vector_norm(summable(flat))), float(projection)]

    def begin(self, plan: Plan) -> None:
        """Begin the second pass."""
        self._plan = plan

    def end(self) -> None:
        """End the second pass, and release the gradients of the outputs."""
        self._plan = None

    def take(self, value: Any, group: MicrobatchGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``total`` and ``pair`` of a microbatch, given the result of the forward pass.

        Raises:
            InputError: the outputs in the second pass are not those of the first pass.
        """
        outputs, plan = outputs_of(value, group.samples, group.microbatches), self._plan
        microbatch = group.microbatches.start
        if self._collect is not None:
            self._collect(microbatch, outputs)
            return torch.zeros((), requires_grad=True), torch.zeros(2, dtype=torch.float64)
        if plan is None:  # outside of a step: to warm up, to measure memory, or to compare a cut model with the whole
            total = _some_loss(outputs)
            return total, torch.stack([total.detach(), torch.full_like(total, group.samples)]).double()
        if self.compares:
            self._compare(plan, outputs, microbatch)
        terms = []
        rows = plan.rows[microbatch]
        for name, gradient in plan.gradients.items():
            own = outputs.tensors[name]
            if gradient is not None and own.requires_grad:
                part = gradient if plan.forms[name].added else gradient[rows.start : rows.stop]
                terms.append(_product(own.to(part.device), part))
        for parameter, gradient in plan.parameters:
            terms.append(_product(parameter, gradient if microbatch == 0 else torch.zeros_like(gradient)))
        total = torch.stack(terms).sum() if terms else 0.0 * _some_loss(outputs)
        pair = plan.pair if microbatch == 0 else torch.zeros_like(plan.pair)
        return total if plan.scale == 1.0 else total / plan.scale, pair

    def _compare(self, plan: Plan, outputs: Outputs, microbatch: int) -> None:
        where = name_microbatches(range(microbatch, microbatch + 1))
        check_forms(plan.forms, outputs.forms, f"{where} in the first pass", "the same microbatch in the second pass")
        for name, found in self.marks_of(outputs).items():
            if not _are_alike(plan.marks[microbatch][name], found):
                how = "is a different sum" if plan.forms[name].added else "has different values"
                raise InputError(_NOT_AGAIN.format(what=spelled(name), microbatch=where, step=plan.step, how=how))

    def plan(self, compute: ForwardRunner, outputs: Outputs, batch: Batch, *, twice: bool) -> Plan:
        """Compute the loss over the outputs of the whole batch, and its gradient. Every worker gets the same result.

        Args:
            outputs: outputs of all microbatches, with ``requires_grad`` for those that have a gradient.
            twice: whether to compute the loss twice, to check that it repeats.

        Returns:
            the plan without ``rows`` and ``marks``.
        """
        known = {id(value) for value in [*compute.model.parameters(), *compute.model.buffers()]}
        before = Attributes({"batch_loss": self._loss}, known) if twice else None
        found = self._differentiate(compute, outputs, batch, known if twice else set())
        if before is not None:
            after = Attributes({"batch_loss": self._loss}, known)
            again = self._differentiate(compute, outputs, batch)
            after.put_back()
            if not self._repeats(found, again):
                names = [name for name, value in after.values.items() if not same(value, before.values.get(name))]
                raise InputError(_OWN_STATE.format(named=f": it changes {', '.join(names[:3])}" if names else ""))
        return found

    def _repeats(self, found: Plan, again: Plan) -> bool:
        pairs = [(found.pair, again.pair), *zip(found.gradients.values(), again.gradients.values(), strict=True)]
        return all(
            left is right
            or (left is not None and right is not None and _are_alike(self._mark(left), self._mark(right)))
            for left, right in pairs
        )

    def _differentiate(
        self, compute: ForwardRunner, outputs: Outputs, batch: Batch, known: Container[int] = ()
    ) -> Plan:
        """Compute the loss and its gradient.

        Args:
            known: ids of the model's parameters, to refuse others. Empty if parameters are not checked.
        """
        leaves = {name: value.detach().requires_grad_(value.requires_grad) for name, value in outputs.tensors.items()}
        given = {name: value.clone() for name, value in leaves.items()}  # the loss may change them in place
        seed_all(compute.seed(BATCH_LOSS, batch.step))
        with torch.enable_grad(), compute.precision(), compute.keeping_weights():
            try:
                value = self._loss(given.get("", given), batch)
            except Exception as error:
                in_user_call(error, f"This was batch_loss of step {batch.step} ({batch.samples} samples).")
                raise
            loss = loss_of_result(value, 1)
        if (name := compute.buffers.changed_name()) is not None:
            raise InputError(_BUFFER.format(name=name))
        if not loss.total.requires_grad:
            raise InputError(_NO_GRADIENT)
        if known and (outside := _outside(loss.total, known)) is not None:
            raise InputError(_OUTSIDE.format(shape=list(outside.shape)))
        if compute.metrics is None:
            compute.metrics, compute.counts = tuple(loss.metrics), False
        check_names(compute.metrics, tuple(loss.metrics))
        scale = compute.loss_scale
        count = 1.0 if scale is None else 1.0 / scale.unit  # the scale is for a sum over the samples
        mean = loss.total if isinstance(loss.counted, int) and loss.counted == 1 else loss.total / loss.counted
        parameters = [one for one in compute.model.parameters() if one.requires_grad]
        needing = [name for name, one in leaves.items() if one.requires_grad]
        every = [*(leaves[name] for name in needing), *parameters]
        gradients = torch.autograd.grad(mean * (count * compute.scale), every, allow_unused=True)
        if all(one is None for one in gradients):
            raise InputError(_NO_GRADIENT)
        of_leaves: dict[str, torch.Tensor | None] = dict(zip(needing, gradients, strict=False))
        used = [
            (parameter, summable(gradient))
            for parameter, gradient in zip(parameters, gradients[len(needing) :], strict=True)
            if gradient is not None
        ]
        pair = loss._replace(total=mean.detach(), counted=1.0).pair()
        pair[:2] *= count
        return Plan(batch.step, (), outputs.forms, of_leaves, used, pair, compute.scale, {})


@cache
def _weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of values by index: odd integers for a digest of bits, and cosines for a projection."""
    index = torch.arange(_CHUNK, device=device)
    return 2 * index + 1, index.double().cos()


def _are_alike(known: list[int | float], found: list[int | float]) -> bool:
    """Return whether digests are equal, or norms and projections close. Other checks report NaN and infinity."""
    if len(known) == 1 or not all(map(math.isfinite, known + found)):
        return len(known) > 1 or known == found
    return all(abs(one - other) <= TOLERANCE * known[0] for one, other in zip(known, found, strict=True))


def _outside(loss: torch.Tensor, known: Container[int]) -> nn.Parameter | None:
    """Return a parameter in the graph of the loss that is not among the known ones, or None."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter) and id(variable) not in known:
            return variable
        waiting += [following for following, _ in node.next_functions]
    return None


def _some_loss(outputs: Outputs) -> torch.Tensor:
    """Return a scalar with a gradient for each value of all outputs."""
    terms = [
        _product(value, torch.linspace(1.0, 2.0, value.numel(), device=value.device).view(value.shape).to(value.dtype))
        for value in outputs.tensors.values()
        if value.requires_grad
    ]
    return sum(terms, torch.zeros((), dtype=torch.float64))  # on the CPU, as outputs may be on several devices


def _product(value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a scalar in float64 whose gradient for ``value`` is ``gradient``."""
    if value.is_complex():
        value, gradient = torch.view_as_real(value), torch.view_as_real(gradient)
    return (summable(value) * summable(gradient)).sum().double()
