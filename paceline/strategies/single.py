"""Everything in one process: the reference that the others are compared with.

::

    for each microbatch m:   forward, backward      the gradient of the sum of its losses
    add them up along the canonical tree, divide by the count, update
"""

from __future__ import annotations

import torch
from torch import nn

from paceline.comm.notes import plain
from paceline.config import Settings
from paceline.data.feed import Piece
from paceline.errors import ConfigError
from paceline.strategies.base import Job, Outcome, Strategy
from paceline.strategies.joining import Joining
from paceline.strategies.outcome import conclude
from paceline.strategies.sums import Sums, Values
from paceline.strategies.verdict import Part


class Single(Strategy):
    """Plain PyTorch in one process."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._joining = Joining(job)
        self._parameters = list(job.update.parameters.values())

    @classmethod
    def check(cls, settings: Settings, model: nn.Module, workers: int) -> None:
        if workers > 1:
            raise ConfigError(
                f"strategy 'single' is for one process, but there are {workers} workers: use 'allreduce'."
            )

    @property
    def decided(self) -> bool:
        return self._joining.decided

    def pieces(self, step: int) -> list[range]:
        return self._joining.pieces(range(len(self._job.order.parts_of(step))))

    def step(self, step: int, pieces: list[Piece]) -> Outcome:
        job, exact = self._job, self._job.settings.exact
        gradients, statistics = Sums(exact), Sums(exact)
        pairs, missing = [], []
        self._take_gradients()
        job.compute.buffers.begin()
        job.update.check_frozen()
        for piece in pieces:
            computed = job.compute.forward_pass(piece, step)
            computed.total.backward()
            values = self._take_gradients()
            gradients.push(piece.microbatches.start, values)
            statistics.push(piece.microbatches.start, [*computed.buffers])
            pairs.append(computed.pair)
            missing.append(frozenset(place for place, value in enumerate(values) if value is None))
        table = torch.stack(pairs) if len(pairs) > 1 else pairs[0].unsqueeze(0)
        parts = [
            Part(piece.microbatches, 0, loss, count, without)
            for piece, (loss, count), without in zip(pieces, table.tolist(), missing, strict=True)
        ]
        count = plain(table[:, 1].sum())
        means = gradients.total()
        given = [value for value in means if value is not None]
        if given:
            torch._foreach_div_(given, count)
        for parameter, value in zip(self._parameters, means, strict=True):
            parameter.grad = value
        self._joining.decide(pieces, table)
        samples = sum(piece.samples for piece in pieces)
        changed = [value.div_(samples) for value in self._changed(statistics.total())]
        return conclude(job, step, pieces, parts, changed, job.world.notice())

    def close(self) -> None:
        self._take_gradients()

    def _changed(self, sums: Values) -> list[torch.Tensor]:
        buffers = self._job.compute.buffers
        if not buffers.settled:
            sums = [sums[place] for place in buffers.settle(buffers.live)]
        return [value for value in sums if value is not None]

    def _take_gradients(self) -> Values:
        values: Values = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return values
