"""Synchronous data parallel training: shares of the batch, one sum of gradients, the same update everywhere.

::

    worker 0   F0 B0 F1 B1 ┐
    worker 1   F2 B2       ┼ exchange ─ update          4 microbatches on 3 workers: shares of 2, 1, 1
    worker 2   F3 B3       ┘

The gradients leave in buckets while the backward pass of a worker's last microbatch computes the rest (Li et al. 2020,
arXiv 2006.15704). A worker adds the gradients of its own microbatches first: with ``exact`` along the canonical tree,
sending each whole node (``comm.reduction.bucketed``); without, into one running sum. All workers then hold the same mean and
make the same update.
"""

from __future__ import annotations

from itertools import chain
from time import perf_counter

import torch
from torch import nn

from paceline.comm.reduction.bucketed import Exchange
from paceline.comm.reduction.shared_memory import exchange_for
from paceline.comm.step_header import HEADER, LOSSES, MISSING, ROW_BYTES, Losses, Note, Notes
from paceline.data.feed import Piece
from paceline.errors import InputError
from paceline.schedule.shares import even
from paceline.schedule.tree import Node, whole_nodes
from paceline.step.accumulate import Sums, Values, add_one
from paceline.step.checks import Part, check_dense
from paceline.step.commit import conclude
from paceline.step.fusion import Joining
from paceline.strategies.base import Job, Outcome, Strategy

_GRADIENT_TAGS, _STATISTICS_TAGS = 1 << 12, 1 << 28


class AllReduce(Strategy):
    """All workers compute a share of each batch and average their gradients.

    Args:
        job: what is trained.
        apart: never compute several microbatches in one pass.

    Attributes:
        seconds: how long each worker computed in the last step, as far as nobody had to wait for others.
    """

    def __init__(self, job: Job, apart: bool = False) -> None:
        super().__init__(job)
        self.seconds: list[float] = [0.0] * job.world.size
        self._joining = Joining(job, apart)
        self._parameters = list(job.update.parameters.values())
        self._leaving = Leaving(job, job.update.parameters, self._exchange_of(job))
        self._statistics: Exchange | None = None
        most = self._most_pieces()
        self._losses = Notes(job.world, LOSSES, ROW_BYTES * (most + HEADER))
        self._missing = Notes(job.world, MISSING, (most + 1) * len(self._parameters))

    def _exchange_of(self, job: Job) -> Exchange | None:
        """What brings the gradients together, the last parameter's first; none: the usual exchange."""
        return None

    def _most_pieces(self) -> int:
        """How many pieces a step has at most."""
        return self._job.order.microbatches

    @property
    def decided(self) -> bool:
        return self._joining.decided

    def pieces(self, step: int) -> list[range]:
        return self._joining.pieces(self._shares(step)[self._job.world.rank])

    def _shares(self, step: int) -> tuple[range, ...]:
        return even(len(self._job.order.parts_of(step)), self._job.world.size)

    def _nodes(self, shares: tuple[range, ...]) -> list[list[Node]]:
        if self._job.settings.exact:
            return [whole_nodes(share) for share in shares]
        return [[Node(0, rank)] if share else [] for rank, share in enumerate(shares)]

    def step(self, step: int, pieces: list[Piece]) -> Outcome:
        job, exact = self._job, self._job.settings.exact
        shares = self._shares(step)
        layout = [self._joining.pieces(share) for share in shares]
        nodes = self._nodes(shares)
        statistics = Sums(exact)
        pairs: list[torch.Tensor] = []
        begin = perf_counter()
        self._leaving.begin(nodes, exact)
        job.compute.buffers.begin()
        job.update.check_frozen()
        for piece in pieces:
            job.world.check()
            computed = job.compute.forward_pass(piece, step)
            pairs.append(computed.pair)
            statistics.push(piece.microbatches.start, [*computed.buffers])
            if piece is pieces[-1]:
                losses = self._tell_losses(step, layout, pairs, perf_counter() - begin)
                self._leaving.last(piece.microbatches.start, losses)
            computed.total.backward()
            if piece is not pieces[-1]:
                self._leaving.push(piece.microbatches.start)
        if not pieces:
            losses = self._tell_losses(step, layout, pairs, 0.0)
            self._leaving.nothing(losses)
        without = self._leaving.written()
        losses.results()  # refuses workers at other steps, whose next note may have another size
        missing = self._tell_missing(layout, without)
        self._leaving.finish()
        self.seconds = losses.seconds
        parts = _put_together(layout, losses, _without_gradient(layout, missing.wait()))
        self._joining.decide(pieces, torch.stack(pairs) if pairs else torch.zeros(0, 2))
        means = self._mean_statistics(step, nodes, [values for _, values in statistics.nodes()])
        return conclude(job, step, pieces, parts, means, losses.notice)

    def close(self) -> None:
        self._leaving.close()
        for parameter in self._parameters:
            parameter.grad = None

    def _tell_losses(self, step: int, layout: list[list[range]], pairs: list[torch.Tensor], seconds: float) -> Losses:
        starts = [piece.start for piece in layout[self._job.world.rank]]
        return Losses(self._losses, step, starts, pairs, self._job.world.device, seconds)

    def _parts(self, layout: list[list[range]], losses: Losses, missing: list[list[int]]) -> list[Part]:
        """What all workers know of the pieces that each has computed, once the losses are known.

        Args:
            layout: the pieces of each rank.
            losses: of all pieces; they say whether there is more to tell.
            missing: for each piece of this worker the places of the parameters to which it gave no gradient.
        """
        without = [frozenset[int]()] * sum(map(len, layout))
        if losses.missing:
            without = _without_gradient(layout, self._tell_missing(layout, missing).wait())
        return _put_together(layout, losses, without)

    def _tell_missing(self, layout: list[list[range]], missing: list[list[int]]) -> Note:
        """Tell the others to which parameters this worker's pieces gave no gradient."""
        rows, device = max(map(len, layout)), self._job.world.device
        own = torch.zeros(rows, len(self._parameters), dtype=torch.uint8, device=device)
        for row, places in enumerate(missing):
            if places:
                own[row, places] = 1
        return self._missing.send(own)

    def _samples_of(self, step: int) -> int:
        """How many samples make the update."""
        return self._job.order.samples_of(step)

    def _mean_statistics(self, step: int, nodes: list[list[Node]], sums: list[Values]) -> list[torch.Tensor]:
        """The means over all samples of the batch of the buffers that the forward pass changes."""
        buffers = self._job.compute.buffers
        if not buffers.settled:
            places = buffers.settle(chain.from_iterable(self._job.world.gather(buffers.live, "step")))
            sums = [[values[place] for place in places] for values in sums]
        if not buffers.live:
            return []
        examples = buffers.examples()
        if self._statistics is None:
            self._statistics = exchange_for(self._job.world, examples, self._job.events, "buffers", _STATISTICS_TAGS)
        samples = self._samples_of(step)
        self._statistics.begin(nodes, lambda: samples)
        for member in range(len(examples)):
            for slot, values in zip(self._statistics.slots(member), sums, strict=True):
                value = values[member]
                assert value is not None
                slot.copy_(value)
            self._statistics.written(member)
        self._statistics.finish()
        return [self._statistics.mean(member) for member in range(len(examples))]


class Leaving:
    """The gradients on their way out: each leaves as soon as the last microbatch has given its part.

    Call ``begin``, ``push`` after the backward pass of each microbatch but the last, ``last`` before that of the last,
    ``written`` and ``finish`` after it.
    """

    def __init__(self, job: Job, named: dict[str, nn.Parameter], exchange: Exchange | None = None) -> None:
        self._names = list(named)
        self._parameters = parameters = list(named.values())
        self._exchange = exchange or exchange_for(
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
        self._sums = Sums(exact)
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

    def last(self, microbatch: int, losses: Losses) -> None:
        """From now on gradients leave while they are computed."""
        self._kept, self._nearest = self._sums.before_last(microbatch)
        self._exchange.begin(self._nodes, losses.count)
        self._waiting = set(range(len(self._parameters)))
        self._armed = True

    def at_once(self, nodes: list[list[Node]], sums: list[Values], losses: Losses) -> None:
        """Send sums that are complete already; ``nodes`` are what each rank sends, ``sums`` are of this worker's."""
        self._exchange.begin(nodes, losses.count)
        for place in reversed(range(len(self._parameters))):
            for slot, values in zip(self._exchange.slots(self._member(place)), sums, strict=True):
                if add_one(values[place], None, slot) is None:
                    slot.fill_(-0.0)  # what changes nothing when added, not even the sign of a zero
            self._exchange.written(self._member(place))

    def nothing(self, losses: Losses) -> None:
        """This worker has no microbatch in this step; it still adds up its part of the others' gradients."""
        self._exchange.begin(self._nodes, losses.count)
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


def _put_together(layout: list[list[range]], losses: Losses, without: list[frozenset[int]]) -> list[Part]:
    owned = [(piece, rank) for rank, held in enumerate(layout) for piece in held]
    known = sorted(zip(owned, without, strict=True), key=lambda one: one[0][0].start)
    return [
        Part(piece, rank, loss, count, places)
        for ((piece, rank), places), (_, _, loss, count) in zip(known, losses.results(), strict=True)
    ]


def _without_gradient(layout: list[list[range]], tables: list[torch.Tensor]) -> list[frozenset[int]]:
    """For each piece of all workers the places of the parameters to which it gave no gradient."""
    if not any(table.any() for table in tables):
        return [frozenset()] * sum(map(len, layout))
    return [_places(row) for table, held in zip(tables, layout, strict=True) for row in table[: len(held)]]


def _places(flags: torch.Tensor) -> frozenset[int]:
    return frozenset(flags.nonzero().flatten().tolist())
