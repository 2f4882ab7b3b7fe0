"""Sharded data parallel training: optimizer state, gradients and weights are divided among the workers (ZeRO).

::

    worker 0   F0 B0 F1 B1 ┐                 ┌ update slice 0 ┐
    worker 1   F2 B2       ┼ reduce-scatter ─┼ update slice 1 ┼ weights
    worker 2   F3 B3       ┘                 └ update slice 2 ┘

After Rajbhandari et al. 2020 (arXiv 1910.02054). The step is that of ``strategies.data_parallel.allreduce``, with the
same shares and the same sums. An all-reduce leaves the mean of a chunk on one worker before it sends the means to all.
Here that worker keeps the mean, in memory of its own (stage 2), and updates its slices of the parameters. The workers
of a machine share one copy of the weights (``sharded.shared_weights``, stage 3); to other machines the owner sends the
weights instead of the means. The weights have the same bits. Hashing and saving put one tensor after the other
together (``step.divided.optimizer_state``).

With ``shard_copy`` or ``shard_within`` other workers make the same update of a slice (``sharded.holders``). A worker
that has all its means sends its norms to the others as the sign of this, and updates when it has theirs. If a worker is
lost then, some may have heard from all and others not::

    worker 0   means ─ norms ─ update ───────────┐ step done       The others have all their means and catch up: with
    worker 1   means ─ norms ?                   ├ update          the norm of worker 0 they make the same update.
    worker 2   means (of worker 3, too) ─ norms ?┘ update          If none is done, all repeat the step.
    worker 3   means ─ norms †
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import nn

from paceline.checkpoint.weights.deferred.heap import FreedMemory
from paceline.comm.world import LEAVING
from paceline.data.feed import MicrobatchGroup
from paceline.data.order import BatchOrder
from paceline.environments import env
from paceline.errors import ConfigError, InputError, WorkerLost
from paceline.schedule.shares import even
from paceline.schedule.slices import STAGES
from paceline.settings import Settings
from paceline.step.context import StepResult, TrainingContext
from paceline.step.divided.consolidate import consolidate_state_dict
from paceline.step.divided.optimizer_state import DividedOptimizerState
from paceline.step.divided.tensors import Division
from paceline.step.probes.optimizer_probe import check_draws
from paceline.step.probes.probe import warn
from paceline.strategies.base import WHOLE_WIRES, Capabilities, Strategy, check_shares, sparse_if_plain
from paceline.strategies.data_parallel.allreduce import AllReduce
from paceline.strategies.data_parallel.norms import GlobalNorm
from paceline.strategies.sharded.averaged import DividedAverages
from paceline.strategies.sharded.exchange import SliceExchange
from paceline.strategies.sharded.holders import Owners, receivers_of
from paceline.strategies.sharded.prepared import prepared
from paceline.strategies.sharded.pulled_rows import pulled_tables
from paceline.strategies.sharded.shards import part_of, unite
from paceline.strategies.sharded.tables import Tables
from paceline.system.torch_internals import foreach_norm
from paceline.system.wires import ADAPTIVE

_log = logging.getLogger("paceline")


def capabilities(settings: Settings, workers: int) -> Capabilities:
    """Return the capabilities of sharded training."""
    return Capabilities(
        replicated=False,
        fixed_point=True,
        wires=(*WHOLE_WIRES, ADAPTIVE),
        divides_update=workers > 1,
        divides_state=STAGES[settings.shard] if workers > 1 else 0,
        communication=True,
        even_shares=True,
        sparse_gradients=sparse_if_plain(settings),
        batch_losses=True,
        located=True,
        shares_weights=workers > 1 and settings.shard == "parameters",
        scales_loss=True,
        reads=("bucket_megabytes", "shard", "shard_copy", "shard_within"),
    )


def validate(settings: Settings, model: nn.Module, order: BatchOrder, workers: int, largest: int) -> None:
    """Raise ConfigError for settings that contradict each other, or a batch that cannot be shared."""
    check_shares(settings, order, workers, largest)
    if settings.shard_copy is False and settings.shard_within is not None:
        raise ConfigError(
            "shard_copy = False contradicts shard_within = 'machine', which keeps a copy of each slice on every other "
            "machine: leave out one of them."
        )


class _Update(NamedTuple):
    """Update of a step, with the mean gradients of the held slices by index, and whether each parameter has one."""

    step: int
    gradients: dict[int, torch.Tensor]
    used: list[bool]


class Sharded(Strategy):
    """Strategy in which each owner updates its slices of the parameters, and all workers get the new weights.

    Args:
        context: training context.
        owners: which workers own slices. Defaults to all.
        dedicated: whether owners compute no microbatches.

    Attributes:
        all_reduce: the step up to the mean gradients.
    """

    def __init__(self, context: TrainingContext, owners: Owners | None = None, dedicated: bool = False) -> None:
        self._context, self._dedicated = context, dedicated
        world, parameters = context.world, list(context.update.parameters.values())
        state = self._division = prepared(context, owners)
        self._slices, self._weights, self._shard = state.slices, state.weights, state.shard
        copies, held = state.copies, [*self._shard.own]
        receivers = receivers_of(copies, world.hosts, shared=self._weights is not None)
        self._parts = [part_of(parameters[one.parameter].detach(), one) for one in self._slices]
        in_order = sorted(range(len(self._slices)), key=lambda index: self._slices[index][:2])
        self._order = {index: place for place, index in enumerate(in_order)}  # of the model, as norms are combined
        self._dtypes = [self._parts[index].dtype for index in in_order]
        self._divided = DividedOptimizerState(context, self._own_tensors, state.divided_names)
        self._divided.hashes = state.hashes
        every = pulled_tables(context) if self._weights is not None else ()
        pulled = {index for index, one in enumerate(self._slices) if one.parameter in every}
        self._tables, self._receivers = Tables(context, self._slices, copies, receivers, pulled), receivers
        self._tell_copies(held)
        self._mark = None if world.host_memory is None else world.host_memory.mark()
        self._begin_exchange()
        self._addresses = self._data_pointers()
        self._is_whole, self._first = not state.is_loaded, True
        self._averages = DividedAverages(world, state)
        context.update.averages.divided = lambda: None if self._is_whole else self._averages.in_place()
        self._undecided: _Update | None = None
        self._unfinished: WorkerLost | None = None

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        return self._division.divided_rows() | self._shard.tensors()

    def _begin_exchange(self) -> None:
        """Set the exchange, and the all-reduce that uses it."""
        context, tables, copies = self._context, self._tables, self._division.copies
        shared = self._weights is not None
        self._exchange = SliceExchange(context, tables, self._parts, copies, self._receivers, shared)
        self._global_norm = GlobalNorm(context.world)
        shares = self._shares if self._dedicated else None
        self.all_reduce = AllReduce(context, self._exchange.reducer, shares, self._apply, tables.sections)

    def renew(self, context: TrainingContext) -> Strategy:
        self._end_exchange()
        if context.world.host_memory is not None and self._mark is not None:
            context.world.host_memory.rewind(self._mark)
        self._context = context
        self._begin_exchange()
        return self

    def _end_exchange(self) -> None:
        self.all_reduce.close()
        self._exchange.close()

    def _tell_copies(self, held: Collection[int]) -> None:
        copied = sum(self._parts[one].numel() for one in held if self._slices[one].owner != self._context.world.rank)
        if not copied:
            return
        self._context.events.mark("copies", parameters=copied)
        if self._context.settings.shard_copy and not env.survives_losses():
            warn(
                self._context,
                "shard_copy = True keeps and updates copies for the loss of a worker, but this run ends when a worker "
                "is lost. Start it with paceline run --elastic, or leave out shard_copy to save memory and time.",
            )
        else:
            _log.info(
                "rank %d also keeps the optimizer's state of %s parameters that others own, and updates them, so that "
                "no state is lost with a worker; %s saves this memory",
                self._context.world.rank,
                f"{copied:,}",
                "server.copies=1" if self._context.settings.strategy == "parameter-server" else "shard_copy=false",
            )

    def _shares(self, microbatches: int) -> list[range]:
        """Return the shares of the workers that own no slices."""
        size, owners = self._context.world.size, self._division.owners
        rest = iter(even(microbatches, size - len(owners)))
        return [range(0) if rank in owners else next(rest) for rank in range(size)]

    def groups(self, step: int) -> list[range]:
        return self.all_reduce.groups(step)

    def step(self, step: int, groups: list[MicrobatchGroup]) -> StepResult:
        result = self.all_reduce.step(step, groups)
        try:
            if self._first and result.applied and self._unfinished is None:
                self._first = False
                check_draws(self._context)
                FreedMemory().trim()  # gaps between the moments, which the first update has allocated among gradients
            if result.notice >= LEAVING and self._unfinished is None:
                self.hand_on(step + 1)
        except WorkerLost as lost:  # the step is done
            self._unfinished = lost
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

    @property
    def held(self) -> frozenset[str] | None:
        return None if self._unfinished is None else frozenset()

    def settle(self) -> None:
        if self._unfinished is not None:
            raise self._unfinished

    def _apply(self, step: int) -> tuple[torch.Tensor, float]:
        """Update the held slices from their mean gradients, and exchange the weights."""
        rank = self._context.world.rank
        used = [parameter.grad is not None for parameter in self._context.update.parameters.values()]
        self._exchange.reducer.clear()
        if self.all_reduce.rows is not None:
            self.all_reduce.rows.clear()
            self._tables.begin(self.all_reduce.rows.means)
        gradients = self._means([index for index in self._shard.own if used[self._slices[index].parameter]])
        owned = {index: value for index, value in gradients.items() if self._slices[index].owner == rank}
        copied = {index: value for index, value in gradients.items() if index not in owned}
        if self._context.world.shared_memory is not None:  # in the memory of their owners, which still use it
            copied = {index: value.clone() for index, value in copied.items()}
        self._divided.hashes = None
        self._is_whole &= self._weights is None  # others may update shared weights while this worker waits
        if self._weights is not None:
            self._weights.look()
        update = self._undecided = _Update(step, gradients | copied, used)
        norm = self._norm(owned)
        self._undecided = None
        rate = self._make(update, norm)
        try:
            self._finish(used)
        except WorkerLost as lost:  # the step is done: each worker has the new values of its slices
            self._unfinished = lost
        return norm, rate

    def _means(self, given: Sequence[int]) -> dict[int, torch.Tensor]:
        """Return the mean gradients of held slices that have one, by index."""
        dense = {index: self._parts[index] for index in given if index < self._tables.first}
        means = self._exchange.reducer.means_of(
            dense, [self._tables.slices_of_others[index].parameter for index in dense]
        )
        return means | {index: self._tables.mean(index) for index in given if index >= self._tables.first}

    def _make(self, made: _Update, norm: torch.Tensor) -> float:
        """Update the held slices, and return the learning rate."""
        self._is_whole = False
        self._context.held.clear()
        if self._weights is None:
            self._follow()
        else:
            self._weights.take()
        self._shard.divide()
        for index, value in self._shard.own.items():
            value.grad = made.gradients.get(index)
        with self._shard.in_place():
            _, rate = self._context.update.apply(made.step, norm=norm, here=bool(self._shard.own))
        for value in self._shard.own.values():
            value.grad = None
        return rate

    def _finish(self, used: Sequence[bool]) -> None:
        """Exchange the new weights."""
        if self._weights is None or len(self._context.world.hosts) > 1:
            self._spread()
        if self._weights is not None:
            self._weights.publish()
            parameters = self._context.update.parameters.values()
            for parameter in (one for one, given in zip(parameters, used, strict=True) if given):
                torch.autograd.graph.increment_version(parameter)  # as torch does: an earlier graph lost its weights

    def _spread(self) -> None:
        """Send the weights of the owned slices to the workers that have not seen the update."""
        of = self._parts if self._weights is None else self._weights.received

        def take(index: int, value: torch.Tensor) -> None:
            of[index].copy_(value)

        rank, first = self._context.world.rank, self._tables.first
        with torch.no_grad():
            own = {at: one for at, one in self._shard.own.items() if at < first and self._slices[at].owner == rank}
            self._exchange.spread(own, take)
            self._tables.spread(self._shard.own, of)

    def _norm(self, gradients: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return the global norm of the gradients, after all workers have reduced their slices.

        With ``clip_norm`` it has the bits of one process: the norms of whole parameters, combined in the same order.
        """
        parameters = self._context.update.parameters
        if self._context.settings.clip_norm is None or len(self._slices) == len(parameters):
            values = [one.values() if one.is_sparse else one for one in gradients.values()]
            norms = zip(gradients, foreach_norm(values) if values else (), strict=True)
            return self._global_norm.of({self._order[index]: norm for index, norm in norms}, self._dtypes)
        return self._global_norm.of(self._norms_of_whole(gradients), [one.dtype for one in parameters.values()])

    def _norms_of_whole(self, gradients: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return norms of the gradients of whole parameters. One worker puts the slices of a parameter together."""
        parameters = self._context.update.parameters
        dense = {index: one for index, one in gradients.items() if index < self._tables.first}
        mine = {self._shard.name_of(self._slices[index]): one for index, one in dense.items()}
        parts, shapes = self._tables.whole_means()
        shape_of = {name: value.shape for name, value in parameters.items()} | shapes
        division = Division(self._context.world, mine | parts, shape_of.__getitem__, "clipping")
        whole = division.put_together([*division.parts], lambda name: (division.owner_of(name),))
        places = {name: place for place, name in enumerate(parameters)}
        norms = {places[name]: foreach_norm([value])[0] for name, value in whole}
        empty = [name for name, shape in shapes.items() if not shape.numel() and not self._context.world.rank]
        return norms | {places[name]: torch.zeros((), device=self._context.world.device) for name in empty}

    @property
    def _owned(self) -> frozenset[str]:
        model, trained = self._context.compute.model, self._context.update.parameters
        buffers = (name for name, _ in model.named_buffers())
        frozen = (name for name, _ in model.named_parameters() if name not in trained)
        return self._shard.names.union(self._context.held.names, buffers, frozen)

    @property
    def divided(self) -> DividedOptimizerState | None:
        return None if self._is_whole else self._divided

    def unite(self, steps: int) -> None:
        if self._tables.pulled:
            raise InputError(
                "A traced run records the whole state after each step, and here several machines divide the tables of "
                "paceline.SparseEmbedding: use workers on one machine, or torch.nn.Embedding with sparse=True."
            )
        if not self._is_whole:
            unite(self._context.update, self._shard.release())
            consolidate_state_dict(self._context, self._context.world.gather(self._owned, "synchronizing"))
            self._is_whole = True

    def hand_on(self, steps: int) -> None:
        world, launched = self._context.world, env.launch_info()
        leaving = [rank for rank, leaves in enumerate(world.gather(world.leaving, "synchronizing")) if leaves]
        if launched is None or len(leaving) == world.size:  # the run ends with a save
            return
        if not self._is_whole:
            self._division.hand_on(leaving, "synchronizing")
        self._context.held.is_handed_on = world.rank in leaving

    @property
    def undecided(self) -> bool:
        return self._undecided is not None

    def decide(self, norm: torch.Tensor | float | None) -> frozenset[str] | None:
        made, self._undecided = self._undecided, None
        assert made is not None
        owned = None if self._is_whole else self._owned
        if norm is not None:
            self._make(made, torch.as_tensor(norm, device=self._context.world.device))
            owned = self._shard.names  # all else is as of the step before
        self._release(interrupted=True)
        return owned

    def close(self) -> frozenset[str] | None:
        self._end_exchange()
        owned = None if self._is_whole else self._owned
        if not self.undecided:
            self._release(interrupted=self._unfinished is not None)
        return owned

    def _release(self, interrupted: bool) -> None:
        """Release all views of the weights, which the next strategy would take for the script's (:func:`can_share`).

        Args:
            interrupted: whether a worker may have been lost while it updated its slices.
        """
        interrupted |= self._averages.restore()
        held = self._division.divided_rows()
        if self._weights is not None and interrupted:
            named = {self._shard.name_of(self._slices[index]): one for index, one in self._weights.copied.items()}
            whole = self._division.of_parameter
            held |= {f"parameter/{name}": one if name in whole else one.view(-1) for name, one in named.items()}
        self._context.update.averages.divided = lambda: None
        if not self._is_whole:
            self._context.held.add(self._shard.names, held | self._shard.release())
            self._context.held.has_weights = self._weights is None and not interrupted
            self._context.held.number = self._division.number
        self._parts, self._weights = [], None
        self._division.drop_weights()
        self._shard.drop()
        del self.all_reduce, self._exchange  # an ended session may keep its strategy
