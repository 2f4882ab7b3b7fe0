"""Reduction of an optimizer's gradients, from their submission in the backward pass to the results in ``finish``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.horovod.engine.engine import PLAN, Engine
from paceline.horovod.engine.operations import Task
from paceline.horovod.engine.plan import Plan
from paceline.horovod.engine.requests import Request
from paceline.horovod.errors import HorovodInternalError
from paceline.horovod.process_sets import ProcessSet
from paceline.horovod.runtime import engine
from paceline.horovod.torch.allreduce import allreduce_async_, grouped_allreduce_async_, sparse_allreduce_async
from paceline.horovod.torch.compression import Compressor
from paceline.horovod.torch.requests import Average, Reduction, Sum

_STEPS_BEFORE_PLAN = 2


@dataclass(frozen=True)
class Reduces:
    """Options of the gradient reduction."""

    op: Reduction  # reduction operator
    compression: type[Compressor]  # compression of transferred gradients
    predivide: float  # divisor of gradients before the sum of a mean. Sums are divided by size / ``predivide``.
    sparse_as_dense: bool  # whether sparse gradients are reduced as dense gradients
    process_set: ProcessSet  # workers that take part

    @property
    def factors(self) -> tuple[float, float]:
        """Factors before and after the reduction."""
        return (1.0 / self.predivide, self.predivide) if self.op == Average else (1.0, 1.0)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of an operation that reduces gradients."""
        before, after = self.factors
        return {"op": self.op, "prescale_factor": before, "postscale_factor": after, "process_set": self.process_set}


class Gradients:
    """Gradients submitted by name, separately or in groups, or in fixed buckets once the workers agree on a plan.

    Args:
        groups: groups of parameters whose gradients are reduced in one operation.
        passes: number of backward passes per step.
    """

    def __init__(
        self, names: dict[torch.Tensor, str], how: Reduces, groups: Sequence[Sequence[torch.Tensor]], passes: int
    ) -> None:
        self._names, self._how = names, how
        self._running = engine()
        self._group_of = {one: tuple(group) for group in groups for one in group}
        self.passes = passes
        self._left = dict.fromkeys(names, passes)
        self._finish: dict[Hashable, Callable[[], None]] = {}
        self._taken: set[torch.Tensor] = set()
        self._steps = self._joins = 0
        self._sparse = False
        self._plan: Plan | None = None

    @property
    def in_flight(self) -> bool:
        """Whether any submitted gradients have results that :meth:`finish` has not written."""
        self._renew()
        return bool(self._taken)

    def _renew(self) -> None:
        """Discard submitted gradients and the plan if the workers have re-formed since they were made."""
        if (running := engine()) is not self._running:
            self._running, self._plan = running, None
            self._finish.clear()
            self._taken.clear()
            self._left = dict.fromkeys(self._names, self.passes)
            self._steps = self._joins = 0
            self._sparse = False

    def reset(self, passes: int) -> None:
        """Set the number of backward passes per step."""
        self.passes = passes
        self._left = dict.fromkeys(self._names, passes)

    def take(self, parameter: torch.Tensor) -> None:
        """Count a backward pass of a parameter, and submit its gradient after the last pass of the step."""
        self._renew()
        if self._left[parameter] <= 0:
            raise AssertionError(
                f"The gradient of {self._names[parameter]!r} was computed more than {self.passes} times before step() "
                f"or synchronize(): set backward_passes_per_step of the DistributedOptimizer to the number of "
                f"backward passes in a step."
            )
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._submit(parameter)

    def _submit(self, parameter: torch.Tensor) -> None:
        self._taken.add(parameter)
        if self._plan is not None:
            self._plan.add(parameter)
            return
        if (group := self._group_of.get(parameter)) is None:
            self._finish[parameter] = self._start(parameter)
        elif all(one in self._taken for one in group):
            self._finish[group] = self._start_group(group)

    def _start(self, parameter: torch.Tensor) -> Callable[[], None]:
        gradient, how, name = _gradient_of(parameter), self._how, self._names[parameter]
        sparse = gradient.is_sparse
        self._sparse |= sparse
        if sparse and not how.sparse_as_dense:
            total = sparse_allreduce_async(gradient, name, how.op, how.process_set)
            return lambda: _set(parameter, total())
        given, context = how.compression.compress(gradient.to_dense() if sparse else gradient.contiguous())
        handle = allreduce_async_(given, name=name, **how.arguments)

        def finish() -> None:
            result = how.compression.decompress(handle.results(), context)
            _set(parameter, result.to_sparse() if sparse else result)

        return finish

    def _start_group(self, group: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        how = self._how
        given, contexts = zip(*[how.compression.compress(_gradient_of(one).contiguous()) for one in group], strict=True)
        handle = grouped_allreduce_async_(list(given), name=self._names[group[0]], **how.arguments)

        def finish() -> None:
            for one, result, context in zip(group, handle.results(), contexts, strict=True):
                _set(one, how.compression.decompress(result, context))

        return finish

    def finish(self) -> None:
        """Submit the remaining gradients, with zeros for missing ones. Wait for the results and write them."""
        self._renew()
        running = self._running
        if running.joins != self._joins:
            self._joins, self._steps = running.joins, 0
        if (plan := self._plan) is None:
            for parameter in self._names:
                if parameter not in self._taken:
                    self._submit(parameter)
            for finish in self._finish.values():
                finish()
        else:
            plan.finish()
        self._finish.clear()
        self._taken.clear()
        self._left = dict.fromkeys(self._names, self.passes)
        self._look_ahead(running)

    def _look_ahead(self, running: Engine) -> None:
        """Agree on a plan after two steps, and drop a plan that a worker has left."""
        if self._plan is not None:
            if not self._plan.open:
                self._plan, self._steps = None, 0
            return
        self._steps += 1
        if self._steps == _STEPS_BEFORE_PLAN and self._fits_plan():
            self._plan = self._agree(running)
            self._steps = 0 if self._plan is None else self._steps

    def _fits_plan(self) -> bool:
        dtypes = {one.dtype for one in self._names}
        return (
            not self._sparse
            and not self._group_of
            and self._how.op in (Average, Sum)
            and len(dtypes) == 1
            and all(one.dtype.is_floating_point and one.device.type == "cpu" for one in self._names)
        )

    def _agree(self, running: Engine) -> Plan | None:
        pairs = [(one, name) for one, name in reversed(self._names.items())]
        how, members = self._how, len(self._how.process_set.ranks)
        said = repr([(name, tuple(one.shape), str(one.dtype)) for one, name in pairs])
        detail = hashlib.sha256(f"{said} {how.op} {how.predivide} {how.compression.dtype}".encode()).hexdigest()
        number = how.process_set.process_set_id
        assert number is not None
        handle = running.submit(Request(number, f"plan of {pairs[0][1]}", PLAN, detail=detail), Task([], []))
        try:
            handle.wait()
        except HorovodInternalError:
            if running.failure:
                raise
            return None
        if handle.value is None:
            return None
        before, after = how.factors
        factors = (before, after / members if how.op == Average else after)
        plan = Plan(running.waits, handle.value, pairs, how.compression.dtype, factors, number)
        running.add_plan(plan)
        return plan


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _set(parameter: torch.Tensor, gradient: Any) -> None:
    """Replace a parameter's gradient by the reduced gradient."""
    old = parameter.grad
    if old is None or old.is_sparse or gradient.is_sparse:
        parameter.grad = gradient
    elif old is not gradient:
        old.copy_(gradient)
