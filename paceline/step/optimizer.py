"""Update of the model from averaged gradients: clipping, learning rate, optimizer, schedule."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.weights.averages import Averages
from paceline.data.keys import generator_states, same_states
from paceline.errors import ConfigError, InputError
from paceline.settings import AverageSettings, Settings
from paceline.step.optimizers.calling import begin_training, closure_users, evaluating
from paceline.step.optimizers.exclusive import refuse_other_steps, updating
from paceline.step.optimizers.factory import OptimizerFactory, make_optimizer, make_schedule
from paceline.step.optimizers.loss_scale import LossScale
from paceline.step.optimizers.overlap import check_elements
from paceline.step.optimizers.own_values import OwnValues, refuse_change, refuse_counters
from paceline.step.optimizers.several import SeveralOptimizers, SeveralSchedules, copied, kind_of
from paceline.step.optimizers.structure import Structure
from paceline.system import fault_points
from paceline.system.torch_internals import foreach_norm, version_of


@dataclass(frozen=True)
class Scaling:
    """Factor on the script's learning rate, and the number of warm-up steps until it applies in full.

    ``linear``: in proportion to the batch, with a warm-up (Goyal et al. 2017, arXiv 1706.02677). ``sqrt``: with the
    square root of the batch (Krizhevsky 2014, arXiv 1404.5997).
    """

    factor: float = 1.0
    warmup_steps: int = 0
    reason: str = ""

    def at(self, step: int) -> float:
        if step >= self.warmup_steps:
            return self.factor
        return 1.0 + (self.factor - 1.0) * (step + 1) / self.warmup_steps


def scaling_of(settings: Settings, workers: int) -> Scaling:
    """Return the scaling that the settings ask for, with its reason as text."""
    if settings.scale_lr is None:
        if settings.warmup_steps:
            raise ConfigError(
                f"warmup_steps = {settings.warmup_steps} needs scale_lr ('linear' or 'sqrt'): it raises the learning "
                f"rate from the base value to the scaled one. For another warm-up give a schedule."
            )
        return Scaling()
    if settings.batch_per_worker is None:
        raise ConfigError(
            f"scale_lr = {settings.scale_lr!r} needs batch_per_worker: with batch= the batch, and so the learning "
            f"rate, stays the same for any number of workers."
        )
    factor = float(workers) if settings.scale_lr == "linear" else math.sqrt(workers)
    per_worker = settings.batch_per_worker
    reason = (
        f"learning rate x {factor:g} ({settings.scale_lr}): the batch is {workers} workers x {per_worker} = "
        f"{workers * per_worker} samples"
    )
    if settings.warmup_steps:
        reason += f"; reached over the first {settings.warmup_steps} steps"
    return Scaling(factor, settings.warmup_steps, reason)


class Measured(NamedTuple):
    """Norms of the gradients of a bucket, with the tensors and versions that they were computed from."""

    gradients: list[torch.Tensor]
    versions: list[int]
    norms: Sequence[torch.Tensor]

    def by_id(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Return the norms by identity of the gradients, or nothing if any gradient has changed since."""
        unchanged = [*map(version_of, self.gradients)] == self.versions
        return zip(map(id, self.gradients), self.norms, strict=True) if unchanged else ()


class OptimizerStep:
    """Optimizer step: applies gradients to the parameters.

    Raises:
        InputError: the optimizer or the schedule is not a factory.
    """

    def __init__(
        self,
        model: nn.Module,  # the model. Its parameters that require a gradient or that the optimizer takes are trained.
        optimizer: OptimizerFactory,  # a factory; see :data:`paceline.step.optimizers.factory.OptimizerFactory`
        schedule: Any,  # a factory that is called with the optimizer, factories by optimizer name, or None
        clip_norm: float | None,  # largest global norm of the gradients. None disables clipping.
        scaling: Scaling,
        average: AverageSettings = AverageSettings(),  # noqa: B008 - frozen
    ) -> None:
        self.parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.scaling = scaling
        # shapes of states with one value for each row of a table, by name (``checkpoint.tensors.optimizer_state``)
        self.row_states: dict[str, torch.Size] = {}
        # whether the first update on this worker drew random numbers. None before the first update.
        self.drew: bool | None = None
        self._own_checked = False
        self._seconds = 0.0  # duration of the updates since the last call of take_seconds
        # loss scale if the forward pass is in float16. It skips an update if gradients overflow.
        self.loss_scale: LossScale | None = None
        self._clip_norm = clip_norm
        self._measured: dict[int, Measured] = {}
        if not self.parameters:
            raise InputError("No parameter of the model requires a gradient: there is nothing to train.")
        check_elements(self.parameters)
        self.optimizer = make_optimizer(optimizer, model)
        self._train_owned(model)
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * scaling.factor
        self.closure_users = closure_users(self.optimizer)  # class names of the optimizers that need a closure
        begin_training(self.optimizer)
        refuse_other_steps(self.optimizer)
        # calls the optimizer while it needs a closure. None otherwise.
        self.take: Callable[[Optimizer], None] | None = None
        self.schedule = make_schedule(schedule, self.optimizer)
        self.averages = Averages(average, self.optimizer)  # averages of the weights over the steps
        self.divided_by = ""  # name of the strategy if copies of the optimizer make updates. Empty otherwise.
        # factor on the initial learning rate at a step, instead of scaling and schedule. None to use these.
        self.ramp: Callable[[int], float] | None = None
        # called with a message before an update if parameters or buffers were added or removed
        self.on_other_names: Callable[[str], None] = lambda text: None

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context with the optimizer's evaluation weights in the parameters, if it keeps separate weights."""
        return nullcontext() if self.averages.chosen else evaluating(self.optimizer)

    @property
    def kind(self) -> str:
        """Class of the optimizer, or names and classes of several optimizers, followed by the kind of average."""
        average = self.averages.settings.kind
        return kind_of(self.optimizer) + (f", average: {average}" if average else "")

    @property
    def names(self) -> list[str]:
        """Names of the optimizers if there are several. Empty for a single optimizer."""
        return [*self.optimizer.optimizers] if isinstance(self.optimizer, SeveralOptimizers) else []

    @property
    def without_optimizer(self) -> list[str]:
        """Names of the parameters that require a gradient but belong to no optimizer."""
        held = {id(value) for group in self.optimizer.param_groups for value in group["params"]}
        return [name for name, value in self.parameters.items() if id(value) not in held]

    def _train_owned(self, model: nn.Module) -> None:
        """Train the optimizer's frozen parameters too, because they may be unfrozen later."""
        owned = {value for group in self.optimizer.param_groups for value in group["params"]}
        named = dict(model.named_parameters())
        for value in owned.difference(named.values()):
            raise InputError(
                f"The optimizer has a parameter of shape {list(value.shape)} that is not one of the model's. Make it "
                f"from the parameters of the model that is given to start; put those of a loss into that model, and "
                f"use forward(model, microbatch)."
            )
        self.parameters = {name: value for name, value in named.items() if value.requires_grad or value in owned}
        frozen = {name: value for name, value in named.items() if name not in self.parameters}
        self._structure = Structure(model, frozen)

    def copied(self, names: Container[str]) -> OptimizerStep:
        """Return an update of copies of some parameters, for another thread. The copied optimizer starts without state.

        Args:
            names: names of the parameters to copy. The others are empty in the copy and get no gradient.
        """
        made = copy.copy(self)
        made.parameters = {
            name: nn.Parameter(torch.empty_like(value) if name in names else value.new_empty(0))
            for name, value in self.parameters.items()
        }
        made.drew = False
        memo: dict[int, Any] = {id(value): made.parameters[name] for name, value in self.parameters.items()}
        memo[id(self.optimizer.state)] = defaultdict(dict)
        try:
            made.optimizer, made.schedule = copied(self.optimizer, self.schedule, memo)
        except (TypeError, RuntimeError) as error:
            raise InputError(
                f"{self.kind} or its schedule cannot be copied, as servers on several machines need it: {error}."
            ) from error
        made.averages = Averages(self.averages.settings, made.optimizer)
        return made

    def of(self, name: str) -> OptimizerStep:
        """Return the update by one of several optimizers, with its own parameters and schedule."""
        assert isinstance(self.optimizer, SeveralOptimizers)
        made = copy.copy(self)
        made.optimizer = self.optimizer.optimizers[name]
        made.closure_users = closure_users(made.optimizer)
        held = {id(value) for group in made.optimizer.param_groups for value in group["params"]}
        made.parameters = {key: value for key, value in self.parameters.items() if id(value) in held}
        made.schedule = self.schedule.schedules.get(name) if isinstance(self.schedule, SeveralSchedules) else None
        return made

    def check_structure(self) -> None:
        """Raise InputError if a parameter requires a gradient that the optimizer did not get at the start."""
        self._structure.check()
        if self._structure.changed:
            self.on_other_names(self._structure.changed)

    def other_names(self) -> str:
        """Describe a parameter or buffer that was added or removed since the start. Empty if there is none."""
        return self._structure.update()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first parameter group after the warm-up."""
        return float(self.optimizer.param_groups[0]["lr"])

    def apply(
        self,
        step: int,
        factor: float = 1.0,
        norm: torch.Tensor | None = None,
        here: bool = True,
        made: Callable[[], None] | None = None,
    ) -> tuple[torch.Tensor, float]:
        """Update the parameters from their ``.grad``. Returns the global gradient norm and the learning rate used.

        Args:
            step: number of earlier updates, which decides the warm-up factor.
            norm: global norm before clipping, if ``.grad`` holds only a part of the gradients.
            here: whether this worker takes part in the update. If not, only the schedule advances.
            made: called as soon as the parameters are updated.
        """
        fault_points.reach("between reduction and update", step)
        norm = self.norm() if norm is None else norm
        if self.loss_scale is not None and not self.loss_scale.observe(float(norm)):
            return norm, self.learning_rate
        self.clip(norm)
        with self._scaled(step, factor) as used:
            if here:
                self.averages.around(step, self._step)
            if made is not None:
                made()
        if here:
            self.advance()
        else:
            self.advance_after(1)
        fault_points.reach("after update", step)
        return norm, used

    def apply_inner(self, step: int) -> tuple[torch.Tensor, float]:
        """Update one replica of several, as :meth:`apply` does, but without averages and without the schedule."""
        fault_points.reach("between reduction and update", step)
        norm = self.norm()
        self.clip(norm)
        with self._scaled(step) as used:
            before = self._group_values()
            self._step()
            refuse_counters(before, self._group_values(), self.kind)
        fault_points.reach("after update", step)
        return norm, used

    def take_seconds(self) -> float:
        """Return the duration of the updates and of the schedule's steps on the host since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _group_values(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        return [{key: copy.copy(value) for key, value in group.items() if key != "params"} for group in groups]

    @contextmanager
    def _scaled(self, step: int, factor: float = 1.0) -> Iterator[float]:
        """Return a context in which the groups have the learning rates of a step. It yields the first group's rate."""
        groups = self.optimizer.param_groups
        full = [group["lr"] for group in groups]
        if self.ramp is None:
            rates, now = full, self.scaling.at(step) / self.scaling.factor * factor
        else:
            rates, now = [group["initial_lr"] for group in groups], self.ramp(step) * factor
        changes = now != 1.0 or self.ramp is not None
        if changes:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * now
        yield float(groups[0]["lr"])
        if changes:
            for group, rate in zip(groups, full, strict=True):
                group["lr"] = rate

    def _step(self) -> None:
        """Call the optimizer. If it does not take sparse or dense gradients, explain its error."""
        before = generator_states() if self.drew is None else None
        own = self._own_values() if self.divided_by and not self._own_checked else None
        self._own_checked, begin = True, time.perf_counter()
        try:
            with updating:
                if self.take is None:
                    self.optimizer.step()
                else:
                    self.take(self.optimizer)
        except RuntimeError as error:
            every = reversed(self.parameters.items())  # so that the first parameter of each form remains
            forms = {"sparse" if one.grad.is_sparse else "dense": name for name, one in every if one.grad is not None}
            form = "dense" if "dense gradients" in str(error) else "sparse"
            if form not in forms:
                raise
            raise InputError(
                f"{self.kind} cannot make the update, because the parameter {forms[form]!r} has a {form} gradient: "
                f"{error}. Of torch's optimizers, SGD and Adagrad take sparse gradients and dense ones, SparseAdam "
                f"only sparse ones: give a dictionary of several optimizers, or use torch.nn.Embedding with "
                f"sparse=False."
            ) from error
        self._seconds += time.perf_counter() - begin
        if before is not None:
            self.drew = not same_states(before, generator_states())
        if own is not None:
            refuse_change(own, self._own_values(), self.divided_by)

    def _own_values(self) -> dict[str, Any]:
        return OwnValues(self.optimizer, self.parameters).state(0)

    def clip(self, norm: torch.Tensor | None = None) -> None:
        """Clip the gradients by their global norm if ``clip_norm`` is set."""
        if self._clip_norm is not None:
            norm = self.norm() if norm is None else norm
            updated = [value for group in self.optimizer.param_groups for value in group["params"]]
            torch.nn.utils.clip_grads_with_norm_(updated, self._clip_norm, norm)

    def measure(self, gradients: list[torch.Tensor]) -> None:
        """Compute norms of some gradients while others are in flight. :meth:`norm` computes the remaining norms."""
        measured = Measured(gradients, [*map(version_of, gradients)], foreach_norm(gradients))
        self._measured[id(gradients[0])] = measured

    def norm(self, without: Container[int] = ()) -> torch.Tensor:
        """Return the global 2-norm of the gradients as a scalar tensor, except parameters at indices in ``without``."""
        measured, self._measured = self._measured, {}
        given = [
            value.grad
            for index, value in enumerate(self.parameters.values())
            if value.grad is not None and index not in without
        ]
        if not given:
            return torch.zeros((), device=next(iter(self.parameters.values())).device)
        known = dict(chain.from_iterable(one.by_id() for one in measured.values()))
        norms = [known.get(id(one)) for one in given]
        left = [_elements(one) for one, norm in zip(given, norms, strict=True) if norm is None]
        rest = iter(foreach_norm(left) if left else ())
        total: torch.Tensor = torch.linalg.vector_norm(
            torch.stack([next(rest) if one is None else one for one in norms])
        )
        return total

    def advance(self) -> None:
        if self.schedule is not None:
            begin = time.perf_counter()
            self.schedule.step()
            self._seconds += time.perf_counter() - begin

    def advance_after(self, updates: int) -> None:
        """Advance the schedule by the number of updates that other workers made."""
        if self.schedule is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if this worker's own optimizer made no update
            for _ in range(updates):
                self.advance()


def _elements(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
