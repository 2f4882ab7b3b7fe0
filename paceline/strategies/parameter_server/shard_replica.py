"""Replica of a parameter shard on one of the workers that hold it, for workers on several machines.

::

    worker 2     stage ─────────┐        commit (a table elsewhere: version 7)        apply ──┐
    holder               gradients of 2 ┬ copy                                        version 6 ─ update ─ version 7
    other holder                        └ gradients of 2                              version 6 ─ update ─ version 7

Gradients are stored at all holders before their step counts as done. So every survivor makes the same updates in the
same order, up to the last update that counts, including updates that a lost worker could no longer ask for.

The threads that answer requests make the updates, on copies of the parameters and of the optimizer. Meanwhile the model
of this worker computes with the weights that it has pulled.

A replica updates the rows of tables with sparse gradients in place. It needs no journal of them, because no other
process sees its memory and each update that it begins counts.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.comm.servers.network_claims import Order
from paceline.comm.servers.rpc import Answer, RpcClient
from paceline.comm.servers.shard import OwnBlocks, Shard
from paceline.comm.shm.tensors import bytes_of
from paceline.comm.values import sendable
from paceline.errors import WorkerLost
from paceline.step.context import TrainingContext


@sendable
@dataclass(frozen=True)
class PendingGradients:
    """Metadata of the gradients of a step for one shard."""

    shard: int  # index of the shard
    rank: int  # rank of the worker that computed the gradients
    step: int  # number of the step
    there: list[bool]  # for each parameter of the shard, whether it has a gradient
    rows: dict[int, int]  # number of rows of each sparse gradient, by the index of its parameter
    norm: torch.Tensor  # norm of all gradients, before clipping
    buffers: dict[str, torch.Tensor]  # buffers that the forward pass has changed


class ShardReplica:
    """Shard that this worker holds. Any thread may use it.

    Args:
        tables: names of the parameters with sparse gradients.
        forward: client of the worker with the second copy. None if this is the second copy, or the only one.
    """

    def __init__(
        self,
        context: TrainingContext,
        part: dict[str, nn.Parameter],
        buffers: list[str],
        tables: Container[str],
        forward: RpcClient | None,
    ) -> None:
        self._update = context.update.copied(part)
        named = dict(context.compute.model.named_buffers())
        self._buffers = _Buffers({name: named[name].detach().clone() for name in buffers})
        self._parameters = [self._update.parameters[name] for name in part]
        own = dict(zip(part, self._parameters, strict=True))
        self._shard = Shard(
            OwnBlocks(), self._buffers, own, buffers, self._update.optimizer, self._update.schedule, tables
        )
        self._shard.share_tables()
        self._forward = forward
        self._forwarding, self._lock = threading.Lock(), threading.Lock()
        self._pending: dict[int, tuple[PendingGradients, bytearray]] = {}
        self._rates: dict[int, float] = {}  # of each rank's last update; the rank asks before its next update
        self._version = 0
        self._weights: tuple[int, bytes] = -1, b""

    def begin(self, version: int, source: Shard) -> None:
        """Start from a shard of this worker's own model and optimizer."""
        copy = version % 2
        with self._lock:
            self._shard.fill(copy, b"".join(source.contents(copy)))
            self._shard.read(copy)
            self._version, self._weights = version, (-1, b"")
            self._pending.clear()
            self._rates.clear()

    def stage(self, pending: PendingGradients, data: bytearray) -> Answer:
        """Keep the gradients of a worker at both holders, until they are applied or replaced."""
        self._tell("shard.stage", pending, (data,))
        with self._lock:
            self._pending[pending.rank] = pending, data
        return None, ()

    def apply(self, place: int, orders: Sequence[Order]) -> Answer:
        """Make updates at both holders. Returns the learning rate of the last update, which is the caller's own."""
        self._tell("shard.apply", (place, orders))
        with self._lock:
            self._advance(orders)
            return self._rates[orders[-1].rank], ()

    def pull(self, orders: Sequence[Order], version: int, known: int) -> Answer:
        """Return the current version, which is at least ``version``, and its weights unless the caller knows them."""
        with self._lock:
            self._advance(orders)
            self._check(version)
            if known == self._version:
                return known, ()
            if self._weights[0] != self._version:
                self._weights = self._version, bytes(self._shard.weights(self._version % 2))
            return self._weights[0], (self._weights[1],)

    def pull_rows(self, counts: Mapping[int, int], data: bytearray) -> Answer:
        """Return rows of tables, at least as new as the weights of the caller's last :meth:`pull`.

        Args:
            counts: number of rows of each table, by the index of its parameter.
            data: indices of the rows.
        """
        wanted = torch.frombuffer(data, dtype=torch.int32).to(torch.int64).split([*counts.values()])
        with self._lock:
            found = [self._parameters[index].detach()[rows] for index, rows in zip(counts, wanted, strict=True)]
        return None, [bytes_of(one).numpy().data for one in found]

    def fetch(self, orders: Sequence[Order], version: int) -> Answer:
        """Return the whole shard as it is after the last update that counts."""
        with self._lock:
            self._advance(orders)
            self._check(version)
            return self._version, [bytes(view) for view in self._shard.contents(version % 2)]

    def _check(self, version: int) -> None:
        if self._version < version:
            raise WorkerLost(f"a server has made {self._version} updates, and {version} were asked for.")

    def _tell(self, what: str, words: Any, parts: Sequence[bytearray] = ()) -> None:
        """Forward a request to the holder of the second copy, if there is one."""
        with self._forwarding:
            if self._forward is not None:
                try:
                    self._forward.ask(what, words, parts)
                except WorkerLost:  # the next generation has a new copy
                    self._forward = None

    def _advance(self, orders: Sequence[Order]) -> None:
        """Make the updates that have not been made yet."""
        for order in orders:
            if order.version == self._version + 1:
                self._apply(order)

    def _apply(self, order: Order) -> None:
        pending, data = self._pending[order.rank]
        assert pending.step == order.step, f"step {pending.step} instead of {order.step} of rank {order.rank}"
        start = 0

        def take(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
            nonlocal start
            first, count = start, math.prod(shape)
            start += count * dtype.itemsize
            if not count:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(data, dtype=dtype, count=count, offset=first).view(shape).clone()

        for index, (parameter, there) in enumerate(zip(self._parameters, pending.there, strict=True)):
            parameter.grad = None
            if index in pending.rows:
                count, shape = pending.rows[index], parameter.shape
                rows, values = take(torch.int32, (1, count)), take(parameter.dtype, (count, *shape[1:]))
                parameter.grad = torch.sparse_coo_tensor(
                    rows.to(torch.int64), values, shape, is_coalesced=True, check_invariants=False
                )
            elif there:
                parameter.grad = take(parameter.dtype, parameter.shape)
        for name, value in pending.buffers.items():
            self._buffers.named[name].copy_(value)
        _, self._rates[order.rank] = self._update.apply(order.done, order.factor, pending.norm)
        self._shard.write((self._version + 1) % 2)
        self._version += 1


class _Buffers:
    """Buffers by name, without a model."""

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        self.named = named

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.named.items())
