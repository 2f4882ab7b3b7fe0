"""Results of all microbatch groups of a synchronous step, shared by its workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.collectives.all_gather import AllGather, PendingGather
from paceline.comm.collectives.step_header import MISSING_TAG, Headers, StepHeader
from paceline.data.feed import MicrobatchGroup
from paceline.step.checks import MicrobatchResult
from paceline.step.commit import Apply, with_norm
from paceline.step.context import TrainingContext
from paceline.step.probes.audit import Audit
from paceline.step.replicas import Replicas


class Results:
    """Losses of all microbatch groups, and the parameters to which each group gave no gradient.

    Args:
        context: training context.
        most: largest number of groups of a worker in a step.
        apply: update function. Defaults to the same whole update on every worker.
    """

    def __init__(self, context: TrainingContext, most: int, apply: Apply | None = None) -> None:
        self._context, self._apply = context, apply
        self._norm: torch.Tensor | None = None
        self._headers = Headers(context.world, most)
        self._replicas = Replicas(context)
        self._audit = Audit(context)
        self._step = self._times_apart = 0
        self._set_before: list[float] = []
        self._missing = AllGather(context.world, MISSING_TAG, (most + 1) * len(context.update.parameters), host=True)

    def audit(
        self, step: int, layout: Sequence[Sequence[range]], groups: Sequence[MicrobatchGroup] = ()
    ) -> list[MicrobatchGroup]:
        """Begin a step, and return the groups of this worker, with an audited microbatch in a group of its own.

        Args:
            layout: groups that each rank will compute, as far as they are known.
        """
        self._step = step
        self._headers.audited = self._audit.begin(step, layout)
        self._headers.set_by_loop = self._context.loop.set_apart() if self._context.audits.enabled else ()
        return self._audit.separate(groups)

    def send(
        self,
        step: int,
        starts: list[int],
        pairs: list[torch.Tensor],
        seconds: float = 0.0,
        missing: bool = True,
        again: bool = False,
    ) -> StepHeader:
        """Send the header of this worker; see :class:`StepHeader`.

        If the step is computed ``again``, weights are not compared, because the optimizer is still changing them.
        """
        self._headers.own = self._context.compute.metrics
        self._headers.audited = self._headers.audited and not again
        self._headers.set_by_loop = () if again else self._headers.set_by_loop
        digest = None if again else self._replicas.digest(step)
        return StepHeader(self._headers, step, starts, pairs, seconds, missing, digest)

    def send_missing(self, layout: list[list[range]], missing: list[list[int]]) -> PendingGather:
        """Send which parameters got no gradient from the groups of this worker."""
        rows = max(map(len, layout))
        own = torch.zeros(rows, len(self._context.update.parameters), dtype=torch.uint8)
        for row, places in enumerate(missing):
            if places:
                own[row, places] = 1
        return self._missing.start(own)

    def parts(
        self, layout: list[list[range]], header: StepHeader, missing: PendingGather | None
    ) -> list[MicrobatchResult]:
        """Return the results of the groups of all workers, in the order of microbatches.

        Args:
            missing: table of the parameters without a gradient. None if no gradient is missing.

        Raises:
            DisagreementError: the workers do not hold the same state.
            InputError: the workers have metrics of different names, or the audit has found a difference.
        """
        without = _without_gradient(layout, None if missing is None else missing.wait())
        if header.on_device:
            self._norm = None if self._apply else self._context.update.norm(frozenset.intersection(*without))
            header.read(self._norm)
        self._replicas.check(header.state_digests(), header.seconds)
        unequal = frozenset[int]().union(*without) - frozenset.intersection(*without)
        if not (unequal and self._context.settings.missing_gradient == "stop"):  # commit reports these
            self._compare(header)
        owned = [(group, rank) for rank, held in enumerate(layout) for group in held]
        known = sorted(zip(owned, without, strict=True), key=lambda one: one[0][0].start)
        metrics = metrics_of(self._context, header)
        return [
            MicrobatchResult(group, rank, loss, count, places, metrics=metrics.get(start, ()))
            for ((group, rank), places), (start, _, loss, count) in zip(known, header.losses(), strict=True)
        ]

    def _compare(self, header: StepHeader) -> None:
        """Compare the digests of an audited step, and audit a step before which the loops have set different values.

        A value that differs in each step, such as a time, is audited the 1st, 2nd, 4th, 8th time and so on.
        """
        if header.audited:
            self._audit.compare()
        before, self._set_before = self._set_before, header.set_by_loop
        if header.apart and header.set_by_loop != before:
            self._times_apart += 1
            if self._times_apart & (self._times_apart - 1) == 0:
                self._audit.compare_apart(self._step, header.apart)

    @property
    def whole_update(self) -> bool:
        """Whether this worker makes the whole update, for which it needs the norm of each gradient."""
        return self._apply is None

    def apply(self, header: StepHeader) -> Apply | None:
        """Return the update function after :meth:`parts`. None stands for :meth:`OptimizerStep.apply`."""
        return self._apply if self._norm is None else with_norm(self._context, self._norm, header.norm())


def metrics_of(context: TrainingContext, header: StepHeader) -> dict[int, tuple[float, ...]]:
    """Return the metrics of the groups of all workers, and save their names in the context."""
    metrics = header.metrics()
    context.compute.metrics = header.names
    return metrics


def _without_gradient(layout: list[list[range]], tables: torch.Tensor | None) -> list[frozenset[int]]:
    """Return, for each group of all workers, the indices of the parameters to which it gave no gradient."""
    if tables is None or not tables.any():
        return [frozenset()] * sum(map(len, layout))
    return [_places(row) for table, held in zip(tables, layout, strict=True) for row in table[: len(held)]]


def _places(flags: torch.Tensor) -> frozenset[int]:
    return frozenset(flags.nonzero().flatten().tolist())
