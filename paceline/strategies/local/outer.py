"""Outer steps of local training, each of a fragment of the model, which may be on its way while inner steps continue.

Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): the model is cut into fragments, each with its own outer
step in a period, and inner steps continue while it is on its way::

    local.every = 6, local.fragments = 2, local.delay = 2       S sent   + added up   L landed

    step             0    1    2    3    4    5    6    7    8    9    10
    fragment 0                 S ── + ── L              S ── + ── L
    fragment 1                                S ── + ── L              S

    landed:  replica = mixing * replica + (1 - mixing) * outer weights

The outer gradients are those of the weights when the fragment was sent, which the replicas keep until it lands. So the
fragment in flight is part of the state, and is sent again by workers that load it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.comm.collectives.subgroup import Subgroup
from paceline.comm.transport.base import Message
from paceline.comm.world import World
from paceline.errors import ConfigError
from paceline.schedule.shares import by_size
from paceline.schedule.tree import Node, nodes_of
from paceline.settings import Exact
from paceline.step.context import TrainingContext
from paceline.step.gradients.accumulate import Accumulator
from paceline.step.gradients.codec import largest_of
from paceline.strategies.data_parallel.reducer import Reducer
from paceline.strategies.local.replica import Replica
from paceline.strategies.local.sparse import SparseReducer
from paceline.system.wires import OUTER

STATE = "local"
_FLIGHT = "flight"
_TAGS = 1 << 25


class OuterSteps:
    """Outer optimizer, SGD with Nesterov momentum, and the fragment in flight.

    Args:
        context: training context, whose ``strategy_state`` holds the outer state.
        shares: numbers of the replicas of each rank.
        replicas: replicas of this worker, by number.

    Attributes:
        made: number of outer steps whose result this worker has. Late workers have fewer.
    """

    def __init__(
        self, context: TrainingContext, shares: Sequence[Sequence[int]], replicas: Mapping[int, Replica]
    ) -> None:
        settings, world, named = context.settings, context.world, context.update.parameters
        self._context, self._local, self._shares, self._replicas = context, settings.local, shares, replicas
        self._rate, self._momentum = settings.local.outer_lr, settings.local.outer_momentum
        if settings.strategy == "local-sgd":
            self._rate, self._momentum = 1.0, 0.0
        self._fragments = fragments_of(named, settings.local.fragments)
        alone = Subgroup(world, [0]) if world.size == 1 else None
        self._sparse = settings.wire == OUTER
        self._reducers = [
            SparseReducer(context, own, alone, fragment, shares, replicas)
            if self._sparse
            else Reducer(context, own, alone, overlap=False, any_order=not settings.along_tree)
            for fragment, own in enumerate({name: named[name] for name in names} for names in self._fragments)
        ]
        self._quorum: Reducer | None = None  # of the fragment in flight, if not all workers take part
        self._workers: Sequence[int] = range(world.size)
        self._waited, self._in_air, self.made = 0.0, False, 0

    def close(self) -> None:
        """Release the gradients."""
        for reducer in (*self._reducers, *([self._quorum] if self._quorum else [])):
            reducer.close()

    @property
    def _state(self) -> dict[str, Any]:
        """State that is the same on all workers, except that a late worker has an older one until :meth:`catch_up`."""
        state: dict[str, Any] = self._context.strategy_state[STATE]
        return state

    @property
    def flight(self) -> dict[str, Any] | None:
        """Fragment that has been sent and has not landed: its number, the step, the steps since, and the counts."""
        return self._state.get(_FLIGHT)

    @torch.no_grad()
    def largest(self, fragment: int) -> list[float]:
        """Return the largest outer gradients of this worker's replicas, if formats are scaled, by parameter."""
        if self._reducers[fragment].expect is None:
            return []
        found, parameters = list[torch.Tensor](), self._context.update.parameters
        for one in self._replicas.values():
            changes = [parameters[name].detach() - one.weights[name] for name in self._fragments[fragment]]
            found.append(torch.stack([*largest_of(changes)]) * one.counts[fragment])
        largest: list[float] = torch.stack(found).amax(0).tolist()
        return largest

    def send(
        self, step: int, fragment: int, counts: Mapping[int, float], largest: Sequence[Sequence[float]],
        seconds: float, quorum: Subgroup | None = None,
    ) -> None:  # fmt: skip
        """Start the outer step of a fragment.

        Args:
            step: number of the inner step that has just been made.
            largest: result of :meth:`largest` of each worker.
            seconds: seconds that this worker has waited for the others.
            quorum: workers that take part. Defaults to all.
        """
        if quorum is not None:
            named = {name: self._context.update.parameters[name] for name in self._fragments[fragment]}
            self._quorum, self._workers = Reducer(self._context, named, quorum, overlap=False), quorum.ranks
        for one in self._replicas.values():
            one.send(fragment, self._fragments[fragment], self._local.delay > 0)
        bounds = [max(values) for values in zip(*largest, strict=True)]
        self._state[_FLIGHT] = {"fragment": fragment, "step": step, "age": 0, "counts": counts, "largest": bounds}
        self._waited = seconds
        self._expect_and_send()

    def send_again(self) -> None:
        """Send the fragment in flight if it was loaded."""
        if self.flight is not None and not self._in_air:
            self._expect_and_send()

    def _expect_and_send(self) -> None:
        flight = self.flight
        assert flight is not None
        if (expect := self._reducers[flight["fragment"]].expect) is not None:
            expect(flight.get("largest", ()))
        self._send()

    def _send(self) -> None:
        """Send the outer gradients of the fragment in flight."""
        context, flight = self._context, self.flight
        assert flight is not None
        reducer, along_tree = self._quorum or self._reducers[flight["fragment"]], context.settings.along_tree
        gradients, counts = Accumulator(along_tree), flight["counts"]
        total = _total(counts) or 1.0
        for number, one in self._replicas.items():
            weight = counts[number] / total if self._sparse else counts[number]
            for name, sent in one.sent.items():
                value = context.update.parameters[name]
                value.grad = (value.detach() - sent).mul_(weight)
            gradients.push(number, reducer.take(flight["step"], number))
        sums = [values for _, values in gradients.nodes()]
        reducer.send(self._nodes(along_tree, counts), sums, lambda: total, held=True)
        self._in_air = True

    def go_on(self) -> None:
        """Let the fragment in flight land, or add it up half way so that its means travel in the other half."""
        begin, flight = time.perf_counter(), self.flight
        if flight is None:
            return
        fragment, delay = flight["fragment"], self._local.delay
        if flight["age"] == (delay + 1) // 2:
            (self._quorum or self._reducers[fragment]).go_on()
        if flight["age"] < delay:
            flight["age"] += 1
        else:
            self._land(flight["step"], fragment, flight["counts"])
            waited = self._waited + time.perf_counter() - begin
            self._context.events.mark(
                "outer-step", step=flight["step"], fragment=fragment, counts=flight["counts"], seconds=waited
            )
            del self._state[_FLIGHT]
            self._in_air = False
        self._waited += time.perf_counter() - begin

    def _land(self, step: int, fragment: int, counts: Mapping[int, float]) -> None:
        """Make the outer update of a fragment. With the last one of a period, average and replace the buffers, too.

        Args:
            step: step after which the fragment was sent.
        """
        context, reducer = self._context, self._quorum or self._reducers[fragment]
        while not reducer.finish():
            self._send()
        last = fragment == len(self._fragments) - 1
        if total := _total(counts):
            means = self._mean_buffers(reducer, counts, total) if last else None
            self.update(step, fragment)
            if means is not None:
                context.compute.buffers.accept(means)
        reducer.accept(bool(total))
        reducer.clear()
        self._quorum, self._workers = None, range(self._context.world.size)
        self.made += 1
        for one in self._replicas.values():
            one.land(self._local.mixing)
            if last:
                one.buffers = {}

    def update(self, step: int, fragment: int) -> None:
        """Make the update of a fragment, sent after ``step``, from the outer gradients in ``.grad``."""
        update = partial(self._outer_update, self._fragments[fragment])
        if fragment == len(self._fragments) - 1:
            self._context.update.averages.around(step, update)
        else:
            update()

    def _mean_buffers(self, reducer: Reducer, counts: Mapping[int, float], total: float) -> list[torch.Tensor]:
        context, exact = self._context, self._context.settings.exact
        buffers = Accumulator(exact)
        for number, one in self._replicas.items():
            with one.in_model():
                buffers.push(number, [value * counts[number] for value in context.compute.buffers.examples()])
        context.compute.buffers.begin()
        nodes = self._nodes(exact, counts)
        return reducer.statistics(nodes, [values for _, values in buffers.nodes()], total)

    def _nodes(self, along_tree: Exact, counts: Mapping[int, float]) -> list[list[Node]]:
        """Return the nodes of the tree over the replicas that each rank sends, or one node for its running sum."""
        shares = [[number for number in self._shares[rank] if number in counts] for rank in self._workers]
        if along_tree:
            return [nodes_of(share) for share in shares]
        return [[Node(0, rank)] if share else [] for rank, share in enumerate(shares)]

    @torch.no_grad()
    def catch_up(self, workers: World | Subgroup, made: Sequence[int]) -> None:
        """Give the outer state to workers that were late. The progress of their replicas is kept, as a difference.

        Args:
            workers: workers that call this together.
            made: for each of them, its :attr:`made`.
        """
        behind = [rank for rank, number in enumerate(made) if number < max(made)]
        source = made.index(max(made))
        if not behind or workers.rank not in (source, *behind):
            return
        context, momentum = self._context, self._state["momentum"]
        parameters, live = context.update.parameters, dict(context.compute.model.named_buffers())
        device = {
            name: momentum.get(name, torch.zeros_like(value)).to(value.device) for name, value in parameters.items()
        }
        state = [*(value.detach() for value in parameters.values()), *(device.values() if self._momentum else ())]
        state += [live[name] for name in context.compute.buffers.names]
        with workers.awaiting("to catch up with the outer steps"):
            if workers.rank == source:
                sends = [Message(one.contiguous(), peer, _TAGS + at) for at, one in enumerate(state) for peer in behind]
                transfers = workers.start_transfers(sends, [])
            else:
                before = [value.detach().clone() for value in parameters.values()]
                found = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in state]
                receives = [Message(one, source, _TAGS + at) for at, one in enumerate(found)]
                transfers = workers.start_transfers([], receives)
            for transfer in transfers:
                transfer.wait()
        if workers.rank == source:
            return
        for own, one in zip(state, found, strict=True):
            own.copy_(one)
        if self._momentum:
            momentum.update(device)
        for replica in self._replicas.values():
            for (name, value), old in zip(parameters.items(), before, strict=True):
                replica.weights[name].add_(value.detach() - old)
        self.made = max(made)

    @torch.no_grad()
    def _outer_update(self, names: Sequence[str]) -> None:
        """Make a step of SGD with Nesterov momentum from the outer gradients in ``.grad``."""
        momentum = self._state["momentum"]
        for name in names:
            value = self._context.update.parameters[name]
            gradient = value.grad
            assert gradient is not None
            if self._momentum:
                before = momentum.get(name)
                before = None if before is None else before.to(gradient.device)  # a loaded one is on the host
                momentum[name] = gradient.clone() if before is None else before.mul_(self._momentum).add_(gradient)
                gradient = gradient.add(momentum[name], alpha=self._momentum)
            value.add_(gradient, alpha=-self._rate)


def fragments_of(parameters: Mapping[str, nn.Parameter], count: int) -> list[list[str]]:
    """Divide the parameters, in the order of the model, into fragments of about the same size."""
    names = list(parameters)
    if count > len(names):
        raise ConfigError(
            f"local.fragments = {count}, but the model has {len(names)} trained parameters, and a fragment needs at "
            f"least one: use at most {len(names)}."
        )
    sizes = [parameters[name].numel() for name in names]
    return [names[share.start : share.stop] for share in by_size(sizes, count)]


def _total(counts: Mapping[int, float]) -> float:
    return math.fsum(counts[number] for number in sorted(counts))
