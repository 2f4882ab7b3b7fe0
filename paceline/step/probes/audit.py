"""Audit: some microbatches are computed twice, to show that the result does not depend on the worker or on the order.

::

    step 4     worker 0     5   0 1 2 3  ┐                 microbatch 5 of an audited step belongs to worker 1.
                            ▲            ┼ compare 5       Worker 0 loads and computes it first, without a trace.
               worker 1         4 5 6 7  ┘                 Before the update, all workers compare both digests.

Digests of the data, the loss, the buffers and the gradients are compared: bit for bit with ``exact``, otherwise up to
rounding. A worker without a partner computes the microbatch first, and again after the preceding microbatches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.utils.hooks import RemovableHandle

from paceline.data.feed import Piece
from paceline.data.objects.attributes import same
from paceline.errors import InputError
from paceline.step.context import TrainingContext
from paceline.step.forward import ForwardResult
from paceline.step.probes.digests import DATA, Digests, Found, difference
from paceline.step.probes.probe import warn, without_trace
from paceline.step.probes.repeatability import CURE, what_changes
from paceline.step.replicas import compare

_ALIKE = (
    "Set it alike on all workers: by session.position, not by the rank or a counter of the loop, which begins at 0 on "
    "a worker that joins."
)


class Recorder:
    """Recorder of the digests of one microbatch while :class:`~paceline.step.forward.ForwardRunner` computes it."""

    def __init__(self, context: TrainingContext, step: int, microbatch: int) -> None:
        self._context = context
        self._step, self._microbatches = step, range(microbatch, microbatch + 1)
        self._begun = False
        self._digests = Digests(bool(context.settings.exact))
        self._hooks: list[RemovableHandle] = []

    def begin(self, piece: Piece, step: int) -> bool:
        """Begin a forward pass. Returns whether it is the first pass over the microbatch to record."""
        if self._begun:
            self.close()
            return False
        if step != self._step or piece.microbatches != self._microbatches:
            return False
        self._begun = True
        self._digests.add_data(piece.data)  # before the forward pass can change the data
        return True

    def add(self, result: ForwardResult) -> None:
        """Record the digests of a forward pass, and of the gradients once they are computed."""
        context = self._context
        self._digests.add("the loss", result.pair)
        for name, value in zip(context.compute.buffers.names, result.buffers, strict=True):
            self._digests.add(f"the buffer {name!r}", value)
        for name, parameter in context.update.parameters.items():
            if parameter.requires_grad:
                take = partial(self._digests.add, f"the gradient of {name!r}")
                self._hooks.append(parameter.register_hook(take))

    def close(self) -> None:
        """Stop recording after the backward pass. Parameters that it did not need have no gradient digest."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def found(self) -> Found:
        """Return the digests, empty if this worker did not compute the microbatch."""
        self.close()
        return self._digests.found()


class Audit:
    """Audit of a step: two workers compute the same microbatch, and their digests are compared.

    Args:
        context: training context.
        alone: whether this worker compares with itself, because no other worker has its weights.
    """

    def __init__(self, context: TrainingContext, alone: bool = False) -> None:
        self._context = context
        self._alone = alone or context.world.size == 1
        self._step = self._microbatch = 0
        self._recorders: list[Recorder] = []

    def begin(self, step: int, layout: Sequence[Sequence[range]]) -> bool:
        """Compute the microbatch before an audited step if it is this worker's turn.

        Args:
            step: step number.
            layout: known microbatch groups that each rank, or this worker alone, will compute.

        Returns:
            whether the step is audited.
        """
        context = self._context
        if context.compute.recorder is not None:
            context.compute.recorder.close()  # a worker was lost in an audited step
        self._recorders, context.compute.recorder = [], None
        if not (context.audits.is_due(step) or context.audits.is_last(step)):
            return False
        self._step, self._microbatch = step, context.audits.microbatch(step, len(context.order.parts_of(step)))
        holders = [
            (place, piece) for place, pieces in enumerate(layout) for piece in pieces if self._microbatch in piece
        ]
        if self._alone and not holders:
            return False
        owner, piece = holders[0] if holders else (0, range(1))
        others = [rank for rank in range(context.world.size) if rank != owner]
        joined = context.audits.joined(step)
        if self._alone or context.world.rank == (
            joined if joined in others else others[self._microbatch % len(others)]
        ):
            self._compute()
        if len(piece) > 1 and (self._alone or context.world.rank == owner):
            self._compute()  # the step computes it together with other microbatches
        recorder = Recorder(context, step, self._microbatch)
        self._recorders.append(recorder)
        context.compute.recorder = recorder
        return True

    def _compute(self) -> None:
        """Load and compute the microbatch, and leave no trace."""
        context, begin = self._context, time.perf_counter()
        recorder = Recorder(context, self._step, self._microbatch)
        self._recorders.append(recorder)
        with without_trace(context):
            for value in context.compute.model.parameters():
                value.grad = None
            context.compute.recorder = recorder
            context.compute.forward_pass(self._load(), self._step).total.backward()
            recorder.close()
        seconds = time.perf_counter() - begin
        context.events.mark("audit", step=self._step, microbatch=self._microbatch, seconds=seconds)

    def _load(self) -> Piece:
        (piece,) = self._context.feed.load(self._step, [range(self._microbatch, self._microbatch + 1)])
        return piece

    def compare(self) -> None:
        """Compare the digests before the update. All workers of the strategy call this, or the lone worker.

        Raises:
            InputError: the digests differ, and the run is to stop.
            DisagreementError: the workers do not hold the same weights.
        """
        context = self._context
        recorded = [found for recorder in self._recorders if (found := recorder.found())]
        self._recorders, context.compute.recorder = [], None
        sent = recorded, context.probe_results.apart
        gathered = [sent] if self._alone else context.world.gather(sent, "audit")
        everyone = [digests for digests, _ in gathered]
        self._set_apart(next((text for _, text in gathered if text), ""))
        name, ranks = difference([(rank, digests) for rank, several in enumerate(everyone) for digests in several])
        if not name or not (self._alone or compare(context, "audit")):  # the weights themselves may differ
            return
        told = (name == DATA) in context.probe_results.told
        cause = self._cause(name) if not told and (self._alone or context.world.rank in ranks) else ""
        own = told, cause, context.loop.said, context.loop.attributes()
        known = [own] if self._alone else context.world.gather(own, "audit")
        text = _set_differently([attributes for *_, attributes in known])
        text = text or next((said for _, _, said, _ in known if said), "")
        text = text or self._text(name, ranks, next((cause for _, cause, *_ in known if cause), ""))
        context.probe_results.told.add(name == DATA)
        if any(told for told, *_ in known):
            return
        tell(context, text)

    def _set_apart(self, text: str) -> None:
        """Compute microbatches one by one from the next step on, if one pass changes the loss on any worker."""
        results = self._context.probe_results
        if text and results.fusible:
            results.fusible, results.apart = False, text
            tell(self._context, text)

    def _cause(self, name: str) -> str:
        """Return what the forward pass changes, or "" if nothing is found."""
        if name == DATA:
            return ""
        self._context.compute.buffers.reset()
        return ", ".join(what_changes(self._context, self._load(), self._step)[:3])

    def _text(self, name: str, ranks: tuple[int, int], cause: str) -> str:
        rank, other = ranks
        by = "twice" if self._alone or rank == other else f"by rank {rank} and by rank {other}"
        return text_of(self._step, self._microbatch, by, name, cause)


def text_of(step: int, microbatch: int, by: str, name: str, cause: str) -> str:
    """Describe what an audit has found.

    Args:
        step: audited step.
        microbatch: audited microbatch of the step.
        by: text that names the workers that computed it.
        name: name of the first value that differs.
        cause: what the forward pass changes, if known.
    """
    audit = f"Audit of step {step}: microbatch {microbatch}"
    if name == DATA:
        return (
            f"{audit}, loaded {by}, does not have the same data. The data set or the collate function depends on what "
            f"it was asked for before, or keeps what it drew, or the loop has changed more of it than numbers, texts, "
            f"flags and small arrays. Each worker reads other samples, so the result depends on the number of workers. "
            f"Draw from the global generators of torch, random or numpy each time a sample is read: they are keyed by "
            f"(seed, epoch, sample). Or draw for all samples in __init__."
        )
    because = f": the forward pass changes {cause}" if cause else ""
    return f"{audit}, computed {by}, does not give the same: {name} differs{because}. {CURE}"


def tell(context: TrainingContext, text: str) -> None:
    """Report what an audit has found: warn, or raise if the run is to stop.

    Raises:
        InputError: the run is to stop.
    """
    if context.settings.stops_at_difference:
        raise InputError(f"{text} With audit_action='warn' training goes on.")
    warn(context, text)


def _set_differently(everyone: Sequence[dict[str, dict[Any, Any]]]) -> str:
    """Describe an attribute that the loop has set to different values on different ranks. Empty if there is none."""
    set_anywhere = {
        (owner, key): rank for rank, one in [*enumerate(everyone)][::-1] for owner in one for key in one[owner]
    }
    for (owner, key), setter in set_anywhere.items():
        value = everyone[setter][owner][key]
        for rank, others in enumerate(everyone):
            if key not in others.get(owner, {}):
                return (
                    f"The loop has set {owner}.{key} to {value!r} on rank {setter}, and not on rank {rank}, so the "
                    f"workers compute different things. {_ALIKE}"
                )
            if not same(other := others[owner][key], value):
                return (
                    f"The loop has set {owner}.{key} to {value!r} on rank {setter} and to {other!r} on rank {rank}, so "
                    f"the workers compute different things. {_ALIKE}"
                )
    return ""
