"""Sharded data parallel training: optimizer state, gradients and weights are divided among the workers (ZeRO).

::

    worker 0   F0 B0 F1 B1 ┐                 ┌ update slice 0 ┐
    worker 1   F2 B2       ┼ reduce-scatter ─┼ update slice 1 ┼ weights
    worker 2   F3 B3       ┘                 └ update slice 2 ┘

After Rajbhandari et al. 2020 (arXiv 1910.02054). The step is that of ``strategies.data_parallel.allreduce``, with the
same shares and the same sums. An all-reduce leaves the mean of a chunk on one worker before it sends the means to all.
Here that worker keeps the mean, in memory of its own (stage 2), and updates its slices of the parameters. The workers
of a machine share one copy of the weights (``sharded.shared_weights``, stage 3); to other machines the owner sends the
weights in place of the means. The weights have the same bits. Hashing and saving put one tensor after the other
together (``step.divided.optimizer_state``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from paceline.comm.reduction.direct import DirectExchange
from paceline.comm.reduction.exchange import Exchange
from paceline.comm.reduction.executor import Reduction
from paceline.comm.reduction.shared_memory import SharedMemoryExchange
from paceline.data.feed import MicrobatchGroup
from paceline.errors import WorkerLost
from paceline.schedule.slices import Slice
from paceline.settings import Settings
from paceline.step.context import StepResult, TrainingContext
from paceline.step.divided.consolidate import consolidate_state_dict
from paceline.step.divided.optimizer_state import DividedOptimizerState
from paceline.step.probes.optimizer_probe import check_draws
from paceline.strategies.base import Capabilities, Strategy
from paceline.strategies.data_parallel.allreduce import AllReduce
from paceline.strategies.data_parallel.reducer import Reducer
from paceline.strategies.sharded.shards import OptimizerShard, slices_of
from paceline.strategies.sharded.shared_weights import SharedWeights, can_share, part_of, writer_of

_TAGS = 1 << 12
"""First tag of the gradients, the same as in all-reduce."""
_STAGES = {"optimizer": 1, "gradients": 2, "parameters": 3}
"""Stages of ZeRO."""


def capabilities(settings: Settings, workers: int) -> Capabilities:
    """Return the capabilities of sharded training."""
    return Capabilities(
        replicated=False,
        divides_update=workers > 1,
        divides_state=_STAGES[settings.shard] if workers > 1 else 0,
        even_shares=True,
        scales_loss=True,
        reads=("bucket_megabytes", "shard"),
    )


class Sharded(Strategy):
    """Strategy in which each worker updates its slices of the parameters, and all workers get the new weights."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        world, parameters = context.world, list(context.update.parameters.values())
        self._slices = slices_of(context, world.size)
        self._weights = _shared_weights(context, self._slices)
        self._parts = [part_of(parameters[one.parameter].detach(), one) for one in self._slices]
        self._shard = OptimizerShard(context, self._slices, self._weights.own if self._weights else None)
        self._divided = DividedOptimizerState(context, self._shard.tensors)
        homes = [one.owner for one in self._slices]
        windowed = context.settings.shard != "optimizer"
        exchange: Exchange
        if world.shared_memory is None:
            spread = None if self._weights is None else _receivers(world.hosts)
            exchange = DirectExchange(world, _TAGS, homes=homes, copies={}, windowed=windowed, spread=spread)
        else:
            exchange = SharedMemoryExchange(world.shared_memory, homes, windowed)
        megabytes = context.settings.bucket_megabytes
        size = None if megabytes is None else int(megabytes * 1e6)
        self._reduction = Reduction(world, exchange, self._parts, context.events, "gradients", size)
        context.events.mark("reduction", what="gradients", **self._reduction.describe())
        self._reducer = Reducer(context, reduction=self._reduction, slices=self._slices)
        self._workers = AllReduce(context, self._reducer, apply=self._apply)
        self._addresses = self._data_pointers()
        self._is_whole, self._updating = True, False
        self._first = True

    def groups(self, step: int) -> list[range]:
        return self._workers.groups(step)

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        result = self._workers.step(step, groups)
        with contextlib.suppress(WorkerLost):  # the step is done; the next step detects the loss
            if self._first and result.applied:
                self._first = False
                check_draws(self._context)
            if result.notice:  # a worker that leaves has the only copy of its shard
                self.unite(step + 1)
        return result

    def _data_pointers(self) -> list[int]:
        return [value.data_ptr() for value in self._context.update.parameters.values()]

    def _follow(self) -> None:
        """Use the parameters' current memory, if the script has replaced their ``.data``."""
        if (now := self._data_pointers()) != self._addresses:
            parameters = list(self._context.update.parameters.values())
            self._parts = [part_of(parameters[one.parameter].detach(), one) for one in self._slices]
            self._shard.follow()
            self._addresses = now

    def _apply(self, step: int) -> tuple[torch.Tensor, float]:
        """Update the owned slices from their mean gradients, and exchange the weights."""
        update, reduction = self._context.update, self._reduction
        parameters = list(update.parameters.values())
        used = [parameter.grad is not None for parameter in parameters]
        self._reducer.clear()
        gradients = {index: reduction.mean(index) for index in self._shard.own if used[self._slices[index].parameter]}
        self._divided.hashes = None
        self._is_whole &= self._weights is None  # others may update shared weights while this worker waits
        norm = self._norm(gradients)
        self._updating, self._is_whole = True, False
        if self._weights is None:
            self._follow()
        else:
            self._weights.take()
        self._shard.divide()
        for index, value in self._shard.own.items():
            value.grad = gradients.get(index)
        with self._shard.in_place():
            _, rate = update.apply(step, norm=norm, here=bool(self._shard.own))
        for value in self._shard.own.values():
            value.grad = None
        if self._weights is None or len(self._context.world.hosts) > 1:
            self._spread()
        if self._weights is not None:
            self._weights.publish()
            changed = [parameter for parameter, one in zip(parameters, used, strict=True) if one]
            for parameter in changed:  # as torch does: an earlier graph has lost its weights
                torch.autograd.graph.increment_version(parameter)
        self._updating = False
        return norm, rate

    def _spread(self) -> None:
        """Send the weights of the owned slices to the workers that have not seen the update."""
        of = self._parts if self._weights is None else self._weights.received

        def take(index: int, value: torch.Tensor) -> None:
            of[index].copy_(value)

        with torch.no_grad():
            for index, value in self._shard.own.items():
                self._reduction.mean(index).copy_(value)
            self._reduction.spread(take)

    def _norm(self, gradients: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return the global norm of the gradients, after all workers have reduced their slices.

        The norm has the bits of one process if no parameter is cut, because norms are then combined in the same order.
        """
        last = len(self._slices) - 1
        dtypes = [part.dtype for part in self._parts][::-1]
        if len({one.parameter for one in self._slices}) == len(self._slices):
            of = {index: self._slices[index].parameter for index in gradients}
            dtypes = [value.dtype for value in self._context.update.parameters.values()]
        else:
            of = {index: last - index for index in gradients}
        return self._reducer.norm_of({of[index]: value for index, value in gradients.items()}, dtypes)

    @property
    def _owned(self) -> frozenset[str]:
        model, trained = self._context.compute.model, self._context.update.parameters
        buffers = (name for name, _ in model.named_buffers())
        frozen = (name for name, _ in model.named_parameters() if name not in trained)
        return self._shard.names.union(buffers, frozen)

    def synchronize(self, steps: int) -> None:
        if self._context.update.averages.chosen:  # the evaluation needs the averages, which are divided, too
            self.unite(steps)

    @property
    def divided(self) -> DividedOptimizerState | None:
        return None if self._is_whole else self._divided

    def unite(self, steps: int) -> None:
        if not self._is_whole:
            self._shard.unite()
            consolidate_state_dict(self._context, self._context.world.gather(self._owned, "synchronizing"))
            self._is_whole = True

    def close(self) -> frozenset[str] | None:
        self._workers.close()
        self._shard.unite()
        owned = None if self._is_whole else self._owned
        self._release()
        return frozenset() if self._updating else owned  # some slices may be a step ahead of the others

    def _release(self) -> None:
        """Release all views of the weights, which the next strategy would take for the script's (:func:`can_share`)."""
        self._parts, self._weights = [], None
        self._shard.own.clear()
        self._reduction.close()


def _shared_weights(context: TrainingContext, every: Sequence[Slice]) -> SharedWeights | None:
    """Return the weights in memory that the workers of a machine share. None if each worker keeps its own."""
    memory, world = context.world.host_memory, context.world
    if context.settings.shard != "parameters":
        return None
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()  # torch keeps a graph interrupted by a loss until the next one
    if not all(world.gather(memory is not None and can_share(context), "start")):
        return None
    assert memory is not None
    return SharedWeights(context, memory, every)


def _receivers(hosts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return the ranks that receive the weights of each rank: one on each other machine.

    >>> _receivers([[0, 1], [2, 3], [4]])
    {0: [2, 4], 1: [3, 4], 2: [0, 4], 3: [1, 4], 4: [0, 2]}
    """
    return {
        rank: [writer_of(rank, others) for others in hosts if rank not in others] for ranks in hosts for rank in ranks
    }
