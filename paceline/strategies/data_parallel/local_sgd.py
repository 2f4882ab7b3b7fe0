"""Local SGD: each worker trains on its own for some steps, then all workers average their models.

::

    every = 3, after = 2         ▓ all-reduce   ░ this worker's share of the batch, its own update   A average

    step        0   1   2   3   4       5   6   7
    worker 0    ▓ ┐ ▓ ┐ ░   ░   ░   A ┐ ░   ░   ░   A ┐
    worker 1    ▓ ┼ ▓ ┼ ░  ░  ░     A ┼ ░  ░  ░     A ┼        no worker waits between two averages
    worker 2    ▓ ┘ ▓ ┘ ░    ░    ░ A ┘ ░    ░    ░ A ┘

Stich 2018 (arXiv 1805.09767). After initial synchronous training: post-local SGD (Lin et al. 2018, arXiv 1808.07217).
Parameters, the buffers that the forward pass changes and the optimizer state are averaged. The weight of a worker is
the number of samples that it has trained on since the last average. For SGD, an average after each step is then the
same as averaging the gradients, whatever the shares. Counters are rounded.

The workers also average before an evaluation or a checkpoint, and at the end. The progress of a lost worker since the
last average is lost; the others continue from the model of the worker that is furthest ahead.
"""

from __future__ import annotations

import hashlib
import math
import time
from typing import Any

import torch

from paceline.checkpoint.tensors import load_optimizer_state, named_tensors
from paceline.comm.collectives.step_header import agreed_names
from paceline.comm.reduction.choice import reduction_for
from paceline.comm.reduction.executor import Reduction
from paceline.data.feed import MicrobatchGroup
from paceline.data.keys import UPDATE, seed_of, seed_torch
from paceline.errors import DisagreementError
from paceline.schedule.shares import even
from paceline.schedule.tree import Node
from paceline.settings import Settings
from paceline.step.buffers import summable
from paceline.step.checks import mean_loss
from paceline.step.commit import locate_here, skip
from paceline.step.context import StepResult, TrainingContext
from paceline.strategies.base import Capabilities, Strategy
from paceline.strategies.data_parallel.allreduce import AllReduce
from paceline.strategies.full_batch import FullBatch

_STATE = "local-sgd"
_TAGS = 1 << 20


def capabilities(settings: Settings, workers: int) -> Capabilities:
    """Return the capabilities of local SGD."""
    return Capabilities(exact=False, replicated=False, makes_all_updates=True, carries=False, reads=("local",))


class LocalSgd(Strategy):
    """Strategy of local updates with a periodic average of the models."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        local = context.settings.local
        self._every, self._after = local.every, local.after
        self._synchronous = AllReduce(context) if local.after else None
        self._share = None if local.after else FullBatch(context)
        self._models = Models(context)
        self._trained: list[int] = []
        self._pair = 0.0, 0.0
        self._metrics: dict[str, tuple[float, float]] = {}
        context.warnings.append(
            f"from step {local.after} on each worker updates its own model; the models are averaged after every "
            f"{local.every} steps, before evaluations and checkpoints, and at the end. In between the loss is that of "
            f"the worker's own share, and the bits depend on the number of workers"
        )

    def groups(self, step: int) -> list[range]:
        if step < self._after:
            assert self._synchronous is not None
            return self._synchronous.groups(step)
        share = even(len(self._context.order.parts_of(step)), self._context.world.size)[self._context.world.rank]
        return self._own().groups(step, share)

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        if step < self._after:
            assert self._synchronous is not None
            return self._synchronous.step(step, groups)
        self._context.world.check()
        result = self._train(step, groups)
        if len(self._trained) < self._every:
            return result
        return self._average(step, result)

    def synchronize(self, steps: int) -> None:
        if self._trained:
            self._average(steps - 1, None)

    def close(self) -> None:
        if self._synchronous is not None:
            self._synchronous.close()
        self._own().take_gradients()

    def _own(self) -> FullBatch:
        """Return the computation of this worker's share, created after the synchronous steps have decided on fusion."""
        if self._share is None:
            self._share = FullBatch(self._context)
        return self._share

    def _train(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        """Update the model from this worker's share of the batch.

        Does nothing if this worker has already made the update: when a worker is lost in the average, the step is
        repeated, from the model of a worker that has made its update.
        """
        context, state = self._context, self._context.strategy_state.get(_STATE, {})
        if step < state.get("steps", 0):
            return StepResult(state["loss"], state["norm"], state["learning_rate"], metrics=state.get("metrics", {}))
        self._pair, self._metrics = (0.0, 0.0), {}
        result = self._update(step, groups) if groups else self._without_share(state)
        self._trained.append(step)
        context.strategy_state[_STATE] = {
            "steps": step + 1,
            "loss": result.loss,
            "norm": float(result.norm),
            "learning_rate": result.learning_rate,
            "metrics": result.metrics,
        }
        return result

    def _update(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        context = self._context
        parts, changed = self._own().gradients(step, groups)
        skipped = skip(context, step, parts, lambda bad: locate_here(context, step, groups, bad))
        if skipped is not None:
            context.update.advance()  # the schedule is the same for all workers
            return skipped
        context.compute.buffers.accept(changed)
        self._pair = math.fsum(part.loss for part in parts), math.fsum(part.counted for part in parts)
        columns = [math.fsum(column) for column in zip(*(part.metrics for part in parts), strict=True)]
        pairs = zip(columns[::2], columns[1::2], strict=True)
        self._metrics = dict(zip(context.compute.metrics or (), pairs, strict=True))
        seed_torch(seed_of(UPDATE, context.settings.seed, step))
        norm, rate = (self._own().apply or context.update.apply)(step)
        self._models.weight += self._pair[1]
        return StepResult(mean_loss(parts, exact=False), norm, rate, metrics=_means([self._metrics]))

    def _without_share(self, state: dict[str, Any]) -> StepResult:
        """Advance only the schedule, if a short batch has too few microbatches. Returns the last known loss."""
        self._context.update.advance()
        rate = self._context.update.learning_rate
        return StepResult(state.get("loss", math.nan), 0.0, rate, metrics=state.get("metrics", {}))

    def _average(self, step: int, result: StepResult | None) -> StepResult:
        """Average the models, and return the result of the step with the loss of the whole batch."""
        begin = time.perf_counter()
        world = self._context.world
        own = self._trained, self._models.weight, self._pair, self._metrics, world.notice(), self._models.kinds()
        everyone = world.gather(own, f"averaging after step {step}")
        _check_trained([trained for trained, *_ in everyone])
        weights = [weight for _, weight, *_ in everyone]
        self._models.average(step, weights, same=all(kinds == own[-1] for *_, kinds in everyone))
        self._trained = []
        self._context.events.mark("average", step=step, weights=weights, seconds=time.perf_counter() - begin)
        metrics = _means([metrics for _, _, _, metrics, *_ in everyone])
        count = math.fsum(pair[1] for _, _, pair, *_ in everyone)
        if result is None or count == 0:
            result = result or StepResult(math.nan, math.nan, self._context.update.learning_rate)
            loss, metrics = result.loss, result.metrics
        else:
            loss = math.fsum(pair[0] for _, _, pair, *_ in everyone) / count
        notice = max(notice for *_, notice, _ in everyone)
        return StepResult(loss, result.norm, result.learning_rate, result.applied, notice, metrics)


def _means(everyone: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    """Return the means of metrics from the sums and counts of several workers, some of which may be empty.

    Raises:
        InputError: the workers have metrics of different names.
    """
    known = [(rank, tuple(metrics)) for rank, metrics in enumerate(everyone) if metrics]
    means = {}
    for name in agreed_names(known) if known else ():
        pairs = [everyone[rank][name] for rank, _ in known]
        count = math.fsum(count for _, count in pairs)
        means[name] = math.fsum(value for value, _ in pairs) / count if count else math.nan
    return means


def _check_trained(everyone: list[list[int]]) -> None:
    """Raise if the workers have not trained on the same batches; ``everyone`` has the steps of each rank."""
    steps = set().union(*everyone)
    for rank, trained in enumerate(everyone):
        if missing := steps - set(trained):
            raise DisagreementError(
                f"Rank {rank} has left out the batch of step {min(missing)}, which others have trained on. Every "
                f"worker must take the same batches from session.batches; look for a loop that leaves or skips early "
                f"on some ranks only."
            )


class Models:
    """Average of the tensors that updates and forward passes change.

    Attributes:
        weight: weight of this worker's model: the count of its losses since the last average, usually samples.
    """

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._names: list[str] = []
        self._reduction: Reduction | None = None
        self.weight = 0.0

    def kinds(self) -> str:
        """Return a hash of the names, types and shapes of the tensors."""
        kinds = [(name, value.dtype, value.shape) for name, value in self._changing().items()]
        return hashlib.sha256(repr(kinds).encode()).hexdigest()

    def average(self, step: int, weights: list[float], same: bool) -> None:
        """Replace the tensors of this worker with the mean over all workers.

        Args:
            step: last step before the average.
            weights: weight of each worker.
            same: whether all workers have the same tensors. An optimizer has no state for parameters it never updated.
        """
        self.weight, total = 0.0, math.fsum(weights)
        if total == 0:  # no worker has made an update
            return
        values = self._changing() if same else self._completed()
        own = weights[self._context.world.rank] / total
        reduction = self._reduction_of(values)
        reduction.begin([[Node(0, rank)] if weight else [] for rank, weight in enumerate(weights)], 1.0)
        for member, value in enumerate(values.values()):
            for slot in reduction.slots(member):
                slot.copy_(value).mul_(own)
            reduction.written(member)
        reduction.finish()
        self._context.world.confirm(step)
        self._take({name: reduction.mean(member) for member, name in enumerate(values)}, values)

    def _changing(self) -> dict[str, torch.Tensor]:
        """Return the tensors that updates and forward passes change, by name."""
        context = self._context
        fixed = {f"buffer/{name}" for name, _ in context.compute.model.named_buffers()}
        fixed |= {f"parameter/{name}" for name, _ in context.compute.model.named_parameters()}
        fixed -= {f"buffer/{name}" for name in context.compute.buffers.live}
        fixed -= {f"parameter/{name}" for name in context.update.parameters}
        tensors = named_tensors(context.compute.model, context.update.optimizer)
        return {name: value for name, value in tensors.items() if name not in fixed}

    def _completed(self) -> dict[str, torch.Tensor]:
        """Return the tensors in the same order on all workers, with zeros for tensors that only other workers have."""
        context, own = self._context, self._changing()
        kinds = {name: (value.dtype, value.shape) for name, value in own.items()}
        everyone = context.world.gather((context.compute.buffers.live, kinds), "step")
        context.compute.buffers.fix(name for live, _ in everyone for name in live)
        known: dict[str, tuple[torch.dtype, torch.Size]] = {}
        for _, others in everyone:
            known |= others
        own |= {name: value for name, value in self._changing().items() if name in known}
        device = context.world.device
        return {
            name: own[name] if name in own else torch.zeros(known[name][1], dtype=known[name][0], device=device)
            for name in sorted(known)
        }

    def _reduction_of(self, values: dict[str, torch.Tensor]) -> Reduction:
        if self._reduction is None or self._names != list(values):
            examples = [summable(value).to(self._context.world.device) for value in values.values()]
            self._names = list(values)
            self._reduction = reduction_for(self._context.world, examples, self._context.events, "models", _TAGS)
        return self._reduction

    def _take(self, means: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
        context, state = self._context, {}
        with torch.no_grad():
            for name, value in values.items():
                counts = not (value.is_floating_point() or value.is_complex()) or name.endswith("/step")
                mean = means[name].round() if counts else means[name]
                if name.startswith("optimizer/"):
                    state[name] = mean.to(value.dtype).to(value.device)
                else:
                    value.copy_(mean)
        load_optimizer_state(context.compute.model, context.update.optimizer, state)
