"""Parameter servers for workers on several machines: modes async and bounded.

::

    worker 2       pull ─ compute ─ stage ┬──────────── commit ─ apply ┬──────── pull
    shard 0, at 0              gradients ─┤                    update ─┤
    shard 1, at 1              gradients ─┘                    update ─┘
    table, at 0                             step 5: version 7

Each shard is on one worker, with a copy on another, and has its own lock. A *commit* in the claim table, which is also
on two workers, numbers an update and closes its step in one operation. All shards make the updates in the order of
these numbers (``shard_replica``). If a step was not committed when a worker was lost, its update was never made.

A pull returns the weights of the version that the table had at the request, or newer ones from shards that have been
updated since. Mode ``bounded`` follows the finished steps in the table. If embeddings have sparse gradients, only the
rows that a step uses are pulled and staged (``step_rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.comm.assignment.step_claims import ClaimTable
from paceline.comm.servers.network_claims import Order
from paceline.comm.servers.rpc import Answer, RpcClient, holders
from paceline.comm.servers.shard import OwnBlocks, Shard, cut
from paceline.comm.shm.tensors import bytes_of
from paceline.errors import ConfigError, WorkerLost
from paceline.step.checks import sparse_gradient
from paceline.step.commit import means
from paceline.step.context import StepResult
from paceline.strategies.parameter_server.async_server import factor_of, is_late, servers_among, warnings_of_servers
from paceline.strategies.parameter_server.async_steps import Gradients, Server, set_newest
from paceline.strategies.parameter_server.shard_replica import PendingGradients, ShardReplica
from paceline.strategies.parameter_server.sharing import OverNetwork, copies_of
from paceline.strategies.parameter_server.step_rows import StepRows

_PART_SECONDS = 10.0  # timeout for a holder to send its shard while the workers re-form


class NetworkServer(Server):
    """Client of all shards, with the shards that this worker holds itself."""

    def __init__(self, shared: OverNetwork) -> None:
        super().__init__(shared)
        context, self._claims, self._peers = shared.context, shared.claims, shared.peers
        self._settings, rank = context.settings.server, context.world.rank
        count = servers_among(context.settings, context.world.size)
        self.computes = not self._settings.dedicated or rank >= count
        self._computing = context.world.size - (count if self._settings.dedicated else 0)  # steps per round
        buffers = [name for name, _ in context.compute.model.named_buffers()]
        update = context.update
        self._parts = cut(update.parameters, count)
        self._shards, self._held = list[Shard](), dict[int, ShardReplica]()
        self._holders = [holders(self._peers, place, copies_of(context)) for place in range(count)]
        for place, part in enumerate(self._parts):
            names = [] if place else buffers
            own = part, names, update.optimizer, update.schedule, context.sparse
            self._shards.append(Shard(OwnBlocks(), context.compute.model, *own))
            if rank in self._holders[place]:
                self._held[place] = ShardReplica(context, part, names, context.sparse, self._forward(place))
        self._serve()
        homes = {
            table: (place, index)
            for place, part in enumerate(self._parts)
            for index, (name, table) in enumerate(part.items())
            if name in context.sparse
        }
        if homes and context.settings.compile:
            raise ConfigError(
                f"strategy 'parameter-server' with server.mode = {self._settings.mode!r} pulls the rows of embeddings "
                f"with sparse gradients in hooks, which a compiled model may not call: use compile = false, "
                f"server.mode = 'sync' or sparse=False."
            )
        self._rows = StepRows(context.compute.model, homes, self._pull_rows)
        context.warnings.extend(warnings_of_servers(context))
        self._known = [-1] * count  # version of the weights in each shard
        self._order = [(rank + place) % count for place in range(count)]  # spreads the workers over the servers
        self._pulled = self._rounds_behind = 0
        self._pending: tuple[int, int] | None = None  # step that is being committed, and its delay
        self._last: tuple[int, StepResult] | None = None

    def _forward(self, place: int) -> RpcClient | None:
        first, *others = self._holders[place]
        if self._context.world.rank != first or not others:
            return None
        return self._peers.new_client(others[0])

    def _serve(self) -> None:
        def stage(rank: int, pending: PendingGradients, data: bytearray) -> Answer:
            return self._held[pending.shard].stage(pending, data)

        def answering(act: str) -> Callable[[int, Any, bytearray], Answer]:
            return lambda rank, words, data: getattr(self._held[words[0]], act)(*words[1:])

        def apply(rank: int, words: tuple[int, list[Order]], data: bytearray) -> Answer:
            return self._held[words[0]].apply(*words)

        def rows(rank: int, words: tuple[int, dict[int, int]], data: bytearray) -> Answer:
            return self._held[words[0]].pull_rows(words[1], data)

        self._peers.server.serve("shard.stage", stage)
        self._peers.server.serve("shard.apply", apply)
        self._peers.server.serve("shard.rows", rows)
        for act in ("pull", "fetch"):
            self._peers.server.serve(f"shard.{act}", answering(act))

    def begin(self, version: int) -> None:
        for place, shard in enumerate(self._shards):
            if shard.tables or place in self._held:
                shard.write(version % 2)
                shard.share_tables()
            if place in self._held:
                self._held[place].begin(version, shard)
        self._known = [-1] * len(self._shards)

    # On workers that compute.

    def pull(self, step: int) -> None:
        current = step // self._computing
        if self._settings.mode == "bounded":
            oldest = (current - self._settings.staleness) * self._computing
            self._claims.wait_until(lambda table: table.done_before >= oldest, lambda table: table.owners(oldest))
        table = self._claims.read()
        orders = self._claims.log.orders
        answers = self._ask_all("shard.pull", lambda place: ((place, orders, table.version, self._known[place]), ()))
        for place, (version, data) in answers.items():
            shard = self._shards[place]
            if data:
                shard.weights(version % 2)[:] = data
            self._known[place] = version
            shard.read(version % 2, states=False)
        self._pulled = table.version
        self._rounds_behind = max(0, current - table.done_before // self._computing)
        self._rows.begin()

    def _pull_rows(self, wanted: Mapping[int, Mapping[int, torch.Tensor]]) -> dict[int, bytearray]:
        """Return the bytes of rows of tables by shard. ``wanted``: indices of rows by shard and index of the table."""

        def words_of(place: int) -> tuple[Any, Sequence[memoryview]]:
            counts = {index: len(rows) for index, rows in wanted[place].items()}
            return (place, counts), [_bytes_of(rows) for rows in wanted[place].values()]

        places = [place for place in self._order if place in wanted]
        return {place: data for place, (_, data) in self._ask_all("shard.rows", words_of, places).items()}

    def push(self, gradients: Gradients) -> StepResult | None:
        context, step, norm = self._context, gradients.step, self._context.update.norm()
        self._rows.end()
        loss, metrics = means(context, gradients.parts)
        self._stage(gradients, norm)
        with self._claims.change() as table:
            delay = table.version - self._pulled
            late = is_late(self._settings, delay)
            if late:
                table.give_back(step)
            else:
                self._pending = step, delay
                self._commit(table, step, delay)
        orders = self._claims.log.orders
        if late:
            age = {"pulled": self._pulled, "delay": delay, "staleness": self._rounds_behind}
            context.events.mark("dropped", step=step, **age)
            return None
        rates = self._ask_all("shard.apply", lambda place: ((place, orders), ()))
        result = StepResult(loss, norm, float(rates[0][0]), metrics=metrics)
        self._record_update(step, delay, table.version, result.learning_rate)
        self._last = step, result
        return result

    def _stage(self, gradients: Gradients, norm: torch.Tensor) -> None:
        """Send each shard its gradients."""
        context = self._context
        context.compute.buffers.accept(gradients.buffers)
        named = dict(context.compute.model.named_buffers())
        buffers = {name: named[name].detach().clone() for name in context.compute.buffers.live}

        def words_of(place: int) -> tuple[PendingGradients, Sequence[memoryview]]:
            values = [parameter.grad for parameter in self._parts[place].values()]
            rows, parts = dict[int, int](), list[memoryview]()
            for index, (name, table) in enumerate(self._parts[place].items()):
                value = table.grad
                if value is not None and name in context.sparse:
                    value = sparse_gradient(name, value)
                    indices = value.indices()[0]
                    self._rows.check(name, table, indices)
                    rows[index] = len(indices)
                    parts.append(_bytes_of(indices.to(torch.int32)))
                    value = value.values()
                if value is not None:
                    parts.append(_bytes_of(value))
            there = [value is not None for value in values]
            number, own = gradients.step, {} if place else buffers
            return PendingGradients(place, context.world.rank, number, there, rows, norm, own), parts

        self._ask_all("shard.stage", words_of)
        self._batch.take_gradients()

    def _commit(self, table: ClaimTable, step: int, delay: int) -> None:
        """Close a step, so that its update counts from now on."""
        log, done = self._claims.log, table.done
        del table.open[step]
        table.version += 1
        log.orders.append(Order(table.version, step, self._context.world.rank, done, factor_of(self._settings, delay)))
        del log.orders[: -2 * self._context.world.size]  # a worker waits for its own update before its next commit
        self._staleness.add(delay, self._rounds_behind)

    def record_result(self, table: ClaimTable) -> None:
        if self._last is not None:
            step, result = self._last
            set_newest(table, step, result)
            self._last = None

    def _record_update(self, step: int, delay: int, version: int, rate: float) -> None:
        age = {"pulled": self._pulled, "delay": delay, "staleness": self._rounds_behind}
        self._context.events.mark("update", step=step, version=version, learning_rate=rate, **age)
        self._pending = None

    def _ask_all(
        self,
        what: str,
        words_of: Callable[[int], tuple[Any, Sequence[memoryview]]],
        places: Sequence[int] | None = None,
    ) -> dict[int, tuple[Any, bytearray]]:
        """Ask the first holder of each shard, or of some, with all requests in flight at once."""
        places = self._order if places is None else places
        for place in places:
            self._peers.client(self._holders[place][0]).start(what, *words_of(place))
        return {place: self._peers.client(self._holders[place][0]).finish() for place in places}

    # On all workers, while no step is computed.

    def restore(self, table: ClaimTable, complete: bool) -> None:
        self._rows.end()
        lost: list[str] = []
        for place in self._order:
            found = self._fetch(place, table.version, complete)
            if found is None:
                lost += self._parts[place]
                continue
            self._shards[place].fill(table.version % 2, found)
            self._shards[place].read(table.version % 2)
        if complete:
            self._context.world.gather(None, "step")  # no worker ends while another still reads from it
        elif lost:
            self.owned = frozenset(name for name, _ in _named(self._context.compute.model)).difference(lost)
        if self._pending is not None and self._pending[0] not in table.open:  # it was committed
            step, delay = self._pending
            version = next(one.version for one in self._claims.log.orders if one.step == step)
            self._record_update(step, delay, version, self._context.update.learning_rate)

    def _fetch(self, place: int, version: int, complete: bool) -> bytearray | None:
        """Return a whole shard from a worker that still has it, or None if no worker has."""
        words = place, self._claims.log.orders, version
        if complete:
            return self._peers.client(self._holders[place][0]).ask("shard.fetch", words)[1]
        for rank in self._holders[place]:
            if not self._context.world.is_missing(rank):
                try:
                    return self._peers.parting(rank, _PART_SECONDS).ask("shard.fetch", words)[1]
                except WorkerLost:
                    continue
        return None


def _bytes_of(value: torch.Tensor) -> memoryview:
    if value.numel() == 0:
        return memoryview(b"")
    return bytes_of(value).numpy().data


def _named(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
