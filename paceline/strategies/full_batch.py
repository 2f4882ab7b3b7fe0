"""Gradients of a batch or share on one worker, for the reference, local SGD and the asynchronous strategies."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from paceline.comm.reduction.division import divide_all
from paceline.comm.transport.host_copy import HostCopy
from paceline.data.feed import MicrobatchGroup
from paceline.step.checks import MicrobatchResult, check_dense
from paceline.step.commit import Apply, with_norm
from paceline.step.context import TrainingContext
from paceline.step.gradients.accumulate import Accumulator, Values, align_value
from paceline.step.gradients.formats import codec_for
from paceline.step.gradients.fusion import Fusion
from paceline.step.probes.audit import Audit


class _Computed(NamedTuple):
    """Sums of gradients and buffers over all groups, with the loss and the missing gradients of each group."""

    sums: Values
    statistics: Values
    pairs: list[torch.Tensor]
    missing: list[frozenset[int]]


class FullBatch:
    """Gradients of the microbatches of a step, as a sum along the canonical tree, encoded, or as a running sum.

    Args:
        audited: whether the weights stay unchanged while a step is computed, so that it can be audited.
        encoded: whether gradients are added up in the format of the setting ``wire``.
    """

    def __init__(self, context: TrainingContext, audited: bool = True, encoded: bool = True) -> None:
        self._context = context
        self._audit = Audit(context, alone=True) if audited else None
        self._fusion = Fusion(context, together=False)
        self._parameters = list(context.update.parameters.values())
        # update function for the last gradients. None stands for :meth:`OptimizerStep.apply`.
        self.apply: Apply | None = None
        self._codec = codec_for(context, context.update.parameters, sends=False) if encoded else None
        self.memory = self._codec.memory if self._codec else None

    def groups(self, step: int, share: range | None = None) -> list[range]:
        """Return all microbatches of a step, or those of a share, in the groups in which they are computed."""
        whole = range(len(self._context.order.parts_of(step)))
        return self._fusion.groups(whole if share is None else share, step)

    def gradients(self, step: int, groups: list[MicrobatchGroup]) -> tuple[list[MicrobatchResult], list[torch.Tensor]]:
        """Compute the mean gradients of a step into ``.grad``.

        Returns:
            Result of each microbatch group, and the means of the buffers that the forward pass changes.
        """
        self.take_gradients()  # an audit would keep those of the last step
        audited = self._audit is not None and self._audit.begin(step, [[group.microbatches for group in groups]])
        if self._audit is not None and audited:
            groups = self._audit.separate(groups)
        self._context.compute.buffers.begin()
        self._context.update.check_structure()
        parts, computed, table = self._means(step, groups)
        if self._audit is not None and audited:
            self._audit.compare()
        self._fusion.decide(step, groups, table)
        samples = sum(group.samples for group in groups)
        return parts, [value.div_(samples) for value in self._changed(computed.statistics)]

    def again(self, step: int, groups: list[MicrobatchGroup]) -> list[MicrobatchResult]:
        """Compute the gradients again in the same step, from the current weights. Returns the result of each group."""
        return self._means(step, groups)[0]

    def _means(
        self, step: int, groups: list[MicrobatchGroup]
    ) -> tuple[list[MicrobatchResult], _Computed, torch.Tensor]:
        """Compute the mean gradients into ``.grad``. The returned table has a row of sums and counts for each group."""
        context = self._context
        self.take_gradients()
        computed = self._compute(step, groups)
        while self._codec is not None and not self._codec.fits():
            computed = self._compute(step, groups)
        table = torch.stack(computed.pairs) if len(groups) > 1 else computed.pairs[0].unsqueeze(0)
        numbers = self._divide(table, computed.sums)
        parts = [
            MicrobatchResult(group.microbatches, context.world.rank, loss, count, without, metrics=tuple(metrics))
            for group, (loss, count, *metrics), without in zip(groups, numbers, computed.missing, strict=True)
        ]
        return parts, computed, table

    def _compute(self, step: int, groups: list[MicrobatchGroup]) -> _Computed:
        context = self._context
        gradients, statistics = Accumulator(context.settings.along_tree), Accumulator(context.settings.exact)
        pairs, missing = list[torch.Tensor](), list[frozenset[int]]()
        for group in groups:
            context.world.check()
            computed = self._fusion.forward(group, step)
            computed.total.backward()
            values = self.take_gradients()
            if not context.any_sparse:
                check_dense(context.update.parameters, values, context.sparse)
            if context.settings.along_tree:  # a row's summands in a microbatch are added up first
                values = [one.coalesce() if one is not None and one.is_sparse else one for one in values]
            missing.append(frozenset(place for place, value in enumerate(values) if value is None))
            start = group.microbatches.start
            gradients.push(start, self._codec.encode(values, step, start) if self._codec else values)
            statistics.push(group.microbatches.start, [*computed.buffers])
            pairs.append(computed.pair)
        return _Computed(gradients.total(), statistics.total(), pairs, missing)

    def _divide(self, table: torch.Tensor, sums: Values) -> list[list[float]]:
        """Write the mean gradients to ``.grad``. Returns the table of losses, counts and metrics as numbers.

        An accelerator divides on the device, and the norm of the gradients goes to the host in the same copy.
        """
        on_host = table.device.type == "cpu"
        numbers: list[list[float]] = table.tolist() if on_host else []
        count = math.fsum(row[1] for row in numbers) if on_host else table[:, 1].sum()
        if self._context.compute.scale != 1.0:
            count = count * self._context.compute.scale
        given = [value for value in sums if value is not None]
        if self._codec is not None:
            sums = self._codec.decode(sums, count)
        elif given:
            divide_all(given, count)
        for parameter, value in zip(self._parameters, sums, strict=True):
            parameter.grad = align_value(value)
        if not on_host:
            norm = self._context.update.norm()
            host = HostCopy(torch.cat((table.flatten(), norm.double().reshape(1)))).wait()
            numbers = host[:-1].view(table.shape).tolist()
            self.apply = with_norm(self._context, norm, float(host[-1]))
        return numbers

    def accept(self, applied: bool) -> None:
        """Accept the step after the model was updated, unless it was skipped: its gradients determine later scales."""
        if self._codec is not None:
            self._codec.accept(applied)

    def take_gradients(self) -> Values:
        values: Values = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return values

    def _changed(self, sums: Values) -> list[torch.Tensor]:
        buffers = self._context.compute.buffers
        if not buffers.fixed:
            sums = [sums[place] for place in buffers.fix(buffers.live)]
        return [value for value in sums if value is not None]
