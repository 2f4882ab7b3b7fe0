"""Audit: some microbatches are computed twice, to show that the result does not depend on the worker or on the order.

::

    step 4     worker 0     5   0 1 2 3  ┐                 microbatch 5 of an audited step belongs to worker 1.
                            ▲            ┼ compare 5       Worker 0 loads and computes it first, without a trace.
               worker 1         4 5 6 7  ┘                 Before the update, all workers compare both digests.

Digests of the data, the loss, the buffers and the gradients are compared: bit for bit with ``exact``, otherwise up to
rounding. A worker without a partner computes the microbatch first, and again after the preceding microbatches.

Where workers compute several microbatches in one pass (``step.gradients.fusion``), the first computation is that of the
two halves of the microbatch, so that a loss over several samples is found, too.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from paceline.comm.values import sendable
from paceline.data.feed import MicrobatchGroup, split_group
from paceline.data.keys import seed_untouched, was_drawn
from paceline.data.nested import map_tensors, rows
from paceline.data.objects.differing import differing_attribute
from paceline.errors import InputError
from paceline.step.context import TrainingContext
from paceline.step.forward import ForwardResult
from paceline.step.probes.digests import DATA, TOLERANCE, TOLERANCE_LOW, Digests, Found, difference
from paceline.step.probes.probe import taking_gradients, warn, without_trace
from paceline.step.probes.repeatability import CURE, what_changes
from paceline.step.replicas import compare
from paceline.system.torch_internals import foreach_norm

_log = logging.getLogger("paceline")
_OF_HALVES, _OF_HALVES_LOW = (1e-4, 1e-6), (1e-2, 1e-3)
"""Relative and absolute tolerance of the mean loss of two halves. A loss near zero is nothing but rounding."""
_COUPLED = (
    "Audit of step {step}: the loss looks at several samples at once, as it did not in the first step: {difference}. "
    "Until now each worker computed its microbatches in one pass, so the result depends on the number of workers. From "
    "now on it computes them one by one. Set microbatches (8 is the default), and no step computes them in one pass."
)


class Recorder:
    """Recorder of the digests of one microbatch while :class:`~paceline.step.forward.ForwardRunner` computes it.

    Attributes:
        halved: whether the digests are those of the sums over the two halves of the microbatch.
    """

    def __init__(self, context: TrainingContext, step: int, microbatch: int) -> None:
        self._context = context
        self._step, self._microbatches = step, range(microbatch, microbatch + 1)
        self._begun = self.halved = False
        self._digests = Digests(bool(context.settings.exact))
        self._pair: torch.Tensor | None = None
        self._samples = 0
        self._norms: dict[str, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    def begin(self, group: MicrobatchGroup, step: int) -> bool:
        """Begin a forward pass. Returns whether it is the first pass over the microbatch to record."""
        if self._begun:
            self.close()
            return False
        if step != self._step or group.microbatches != self._microbatches:
            return False
        self._begun, self._samples = True, group.samples
        self._digests.add_data(group.data)  # before the forward pass can change the data
        return True

    def add(self, result: ForwardResult) -> None:
        """Record the digests of a forward pass, and of the gradients once they are computed."""
        context, self._pair = self._context, result.pair
        self._digests.add("the loss", result.pair)
        for name, value in zip(context.compute.buffers.names, result.buffers, strict=True):
            self._digests.add(f"the buffer {name!r}", value)
        for name, parameter in context.update.parameters.items():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(partial(self._add_gradient, name)))

    def _add_gradient(self, name: str, value: torch.Tensor) -> None:
        self._digests.add(f"the gradient of {name!r}", value)
        self._norms[name] = foreach_norm([value.coalesce().values() if value.is_sparse else value])[0]

    def add_halves(self, group: MicrobatchGroup, pair: torch.Tensor) -> None:
        """Record the sums over the two halves, whose gradients are in ``.grad``. Their passes change no buffers."""
        self._begun, self.halved, self._pair = True, True, pair
        self._digests.add_data(group.data)
        self._digests.add("the loss", pair)
        for name, parameter in self._context.update.parameters.items():
            if parameter.grad is not None:
                self._digests.add(f"the gradient of {name!r}", parameter.grad)

    def loss(self) -> float:
        """Return the mean loss of the microbatch. NaN if this worker did not compute it."""
        return math.nan if self._pair is None else float(self._pair[0] / self._pair[1])

    def gradient(self) -> dict[str, float]:
        """Return the samples of the microbatch and the norm of its mean gradient. Empty without a backward pass."""
        if self._pair is None or not self._norms:
            return {}
        norm = math.hypot(*sorted(map(float, self._norms.values())))
        divisor = float(self._pair[1]) * self._context.compute.scale
        return {"samples": self._samples, "norm": norm / divisor} if divisor and math.isfinite(norm) else {}

    def close(self) -> None:
        """Stop recording after the backward pass. Parameters that it did not need have no gradient digest."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def found(self) -> Found:
        """Return the digests, empty if this worker did not compute the microbatch."""
        self.close()
        return self._digests.found()


@sendable
class _Recorded(NamedTuple):
    """Digests of a microbatch or of its halves, and its mean loss."""

    digests: Found
    halved: bool
    loss: float


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
        if not context.audits.is_audited(step):
            return False
        self._step, self._microbatch = step, context.audits.microbatch(step, len(context.order.parts_of(step)))
        holders = [place for place, groups in enumerate(layout) for group in groups if self._microbatch in group]
        if self._alone and not holders:
            return False
        owner = holders[0] if holders else 0
        able = context.order.able(step, self._microbatch, context.world.size)
        others = [rank for rank in able if rank != owner] or [owner]
        joined = context.audits.joined(step)
        auditor = joined if joined in others else others[self._microbatch % len(others)]
        if self._alone or context.world.rank == auditor:
            self._compute(halves=bool(context.probe_results.fusible))
        context.compute.recorder = recorder = Recorder(context, step, self._microbatch)
        self._recorders.append(recorder)
        return True

    def separate(self, groups: Sequence[MicrobatchGroup]) -> list[MicrobatchGroup]:
        """Return the groups of an audited step with the audited microbatch in a group of its own.

        Call this after :meth:`begin`. Not every audit is known when the groups are loaded.
        """
        if self._context.compute.recorder is None:
            return [*groups]
        parts = self._context.order.parts_of(self._step)
        return [one for group in groups for one in split_group(group, parts, self._microbatch)]

    def _compute(self, halves: bool = False) -> None:
        """Load and compute the microbatch, in two halves if that is asked for and possible, and leave no trace."""
        context, begin = self._context, time.perf_counter()
        recorder = Recorder(context, self._step, self._microbatch)
        self._recorders.append(recorder)
        with without_trace(context):
            group = self._load()
            if not (halves and self._compute_halves(group, recorder)):
                self._clear_gradients()
                context.compute.recorder = recorder
                with taking_gradients(context.update.parameters, lambda *_: context.world.check()):
                    context.compute.forward_pass(group, self._step).total.backward()
                recorder.close()
        seconds = time.perf_counter() - begin
        context.events.mark("audit", step=self._step, microbatch=self._microbatch, seconds=seconds)

    def _compute_halves(self, group: MicrobatchGroup, recorder: Recorder) -> bool:
        """Compute both halves of a microbatch. Return False if they cannot be compared with the whole."""
        compute, middle, pairs = self._context.compute, group.samples // 2, list[torch.Tensor]()
        if not middle:
            return False
        self._clear_gradients()
        compute.recorder = None
        try:
            seed_untouched()
            for start, stop in ((0, middle), (middle, group.samples)):
                data = map_tensors(torch.clone, rows(group.data, start, stop))
                total, pair = compute.loss_of(MicrobatchGroup(group.microbatches, stop - start, data))
                (total if compute.scale == 1.0 else total.float() * compute.scale).backward()
                pairs.append(pair)
        except Exception as error:  # noqa: BLE001 - a model may accept only one number of samples
            _log.debug("half a microbatch could not be computed: %s", error)
            return False
        if was_drawn():
            return False
        recorder.add_halves(group, pairs[0] + pairs[1])
        return True

    def _clear_gradients(self) -> None:
        for value in self._context.compute.model.parameters():
            value.grad = None

    def _load(self) -> MicrobatchGroup:
        (group,) = self._context.feed.load(self._step, [range(self._microbatch, self._microbatch + 1)])
        return group

    def compare(self) -> None:
        """Compare the digests before the update. All workers of the strategy call this, or the lone worker.

        The worker to which the microbatch belongs records the norm of its gradient, for ``observe.noise``.

        Raises:
            InputError: the digests differ, and the run is to stop.
            DisagreementError: the workers do not hold the same weights.
        """
        for recorder in self._recorders[-1:]:  # none if only other workers audit the step
            self._record_norm(recorder)
        self._compare()

    def _record_norm(self, recorder: Recorder) -> None:
        context = self._context
        own = self._alone and context.world.size > 1  # a step of this worker, whose norm is that of another batch
        if own or context.compute.batch_loss is not None or context.update.closure_users:
            return  # the gradient of the step is not a mean over the microbatches that were computed first
        if given := recorder.gradient():
            batch = context.order.samples_of(self._step)
            context.events.mark("microbatch-norm", step=self._step, microbatch=self._microbatch, batch=batch, **given)

    def _compare(self) -> None:
        context = self._context
        everyone = self._gather()
        name, ranks = self._difference(everyone)
        halves = [one.loss for several in everyone for one in several if one.halved]
        if halves and name != DATA:
            if not (what := self._difference_of_halves(name, everyone, halves[0])):
                return
            if any(
                one.halved for one in self._recorders
            ):  # compute the whole, to distinguish this from a worker that differs
                self._recorders = [one for one in self._recorders if not one.halved]
                self._compute()
            everyone = self._gather()
            name, ranks = self._difference(everyone)
            if not name and not context.probe_results.told:
                context.probe_results.fusible = False
                tell(context, _COUPLED.format(step=self._step, difference=what))
        if not name or not (self._alone or compare(context, "audit")):  # the weights themselves may differ
            return
        told = (name == DATA) in context.probe_results.told
        cause = self._cause(name) if not told and (self._alone or context.world.rank in ranks) else ""
        own = told, cause, context.loop.said, context.loop.attributes()
        known = [own] if self._alone else context.world.gather(own, "audit")
        text = differing_attribute([attributes for *_, attributes in known], context.loop.outside)
        text = text or next((said for _, _, said, _ in known if said), "")
        text = text or self._text(name, ranks, next((cause for _, cause, *_ in known if cause), ""))
        context.probe_results.told.add(name == DATA)
        if any(told for told, *_ in known):
            return
        tell(context, text)

    def compare_apart(self, step: int, ranks: Sequence[int]) -> None:
        """Compute a microbatch on ranks whose loops have set different values, and :meth:`compare` the digests.

        All workers call this before the update, after the step was computed: only then do they know the difference.
        """
        context, self._recorders = self._context, []
        self._step, self._microbatch = step, context.audits.microbatch(step, len(context.order.parts_of(step)))
        rank, able = context.world.rank, context.order.able(step, self._microbatch, context.world.size)
        if rank in ranks and rank in able:
            context.compute.buffers.reset()
            self._compute()
        self._compare()

    def _gather(self) -> list[list[_Recorded]]:
        """Return what each worker, or this one alone, has recorded of the microbatch."""
        self._context.compute.recorder = None
        own = [_Recorded(found, one.halved, one.loss()) for one in self._recorders if (found := one.found())]
        return [own] if self._alone else self._context.world.gather(own, "audit")

    def _difference(self, everyone: Sequence[Sequence[_Recorded]]) -> tuple[str, tuple[int, int]]:
        found = [(rank, one.digests) for rank, several in enumerate(everyone) for one in several]
        halved = any(one.halved for several in everyone for one in several)
        return difference(found, TOLERANCE_LOW if halved and self._is_low_precision() else TOLERANCE)

    def _difference_of_halves(self, name: str, everyone: Sequence[Sequence[_Recorded]], mean: float) -> str:
        """Describe how a microbatch differs from its halves. Empty if it does not."""
        relative, absolute = _OF_HALVES_LOW if self._is_low_precision() else _OF_HALVES
        for whole in (one.loss for several in everyone for one in several if not one.halved):
            if math.isfinite(whole) and not abs(whole - mean) <= relative * abs(whole) + absolute:
                return f"that of a microbatch is {whole:.5g}, and of its halves {mean:.5g} on average"
        return name and f"{name} of a microbatch is not the sum of those of its halves"

    def _is_low_precision(self) -> bool:
        context = self._context
        kinds = {value.dtype for value in context.update.parameters.values()}
        return context.settings.autocast is not None or not kinds <= {torch.float32, torch.float64}

    def _cause(self, name: str) -> str:
        """Return the object that the forward pass changes, or "" if none is found."""
        if name == DATA:
            return ""
        self._context.compute.buffers.reset()
        return ", ".join(what_changes(self._context, self._load(), self._step)[:3])

    def _text(self, name: str, ranks: tuple[int, int], cause: str) -> str:
        alone = self._alone or ranks[0] == ranks[1]
        by = "twice" if alone else "by rank {} and by rank {}".format(*ranks)
        if name == DATA and (shard := self._context.order.shard_of(self._step, [self._microbatch])):
            by += f" from shard {shard!r}" + ("" if alone else ", of which workers may have different copies")
        return text_of(self._step, self._microbatch, by, name, cause)


def text_of(step: int, microbatch: int, by: str, name: str, cause: str) -> str:
    """Describe what an audit has found.

    Args:
        step: audited step.
        microbatch: audited microbatch of the step.
        by: text that names the workers that computed it.
        name: name of the first value that differs.
        cause: object that the forward pass changes, if known.
    """
    audit = f"Audit of step {step}: microbatch {microbatch}"
    if name == DATA:
        return (
            f"{audit}, loaded {by}, does not have the same data. The data set or the collate function depends on "
            f"earlier requests, or keeps random numbers that it drew; or the forward pass or collate changes samples "
            f"in place; or the loop has changed parts of the data set other than numbers, texts, flags and small "
            f"arrays. Each worker reads other samples, so the result depends on the number of workers. Draw from the "
            f"global generators of torch, random or numpy each time a sample is read: they are keyed by (seed, epoch, "
            f"sample). Or draw for all samples in __init__."
        )
    because = f": the forward pass changes {cause}" if cause else ""
    return f"{audit}, computed {by}, does not give the same result: {name} differs{because}. {CURE}"


def tell(context: TrainingContext, text: str) -> None:
    """Report the finding of an audit: warn, or raise if the run is to stop.

    Raises:
        InputError: the run is to stop.
    """
    if context.settings.stops_at_difference:
        raise InputError(f"{text} With audit_action='warn' training continues.")
    warn(context, text)
