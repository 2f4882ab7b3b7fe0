"""Fusion of neighboring microbatches into one forward pass, if that does not change the result.

One large pass is faster than several small passes (1.2 to 1.4 times for small models on a CPU). It gives the same
result up to rounding only if samples do not influence each other: no dropout (its random numbers belong to a
microbatch), no batch statistics, no loss over pairs of samples. The first step decides: its microbatches are computed
one by one, then its loss is computed once more in one pass, and the gradients of two microbatches.

Later a pass that draws random numbers is computed again microbatch by microbatch, and an audit compares the audited
microbatch with its halves.
"""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace

import torch

from paceline.data.feed import MicrobatchGroup, split_group
from paceline.data.nested import concatenated
from paceline.step.context import TrainingContext
from paceline.step.forward import ForwardResult
from paceline.step.gradients.accumulate import Values, add
from paceline.step.probes.probe import without_trace

_log = logging.getLogger("paceline")
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
_TOLERANCE_AUTOCAST = 1e-3
_OF_GRADIENTS = {torch.float64: 1e-8, torch.float32: 1e-3}
_OF_GRADIENTS_AUTOCAST = 5e-2
_UP = 2.0**24
"""Factor of the gradients in one pass. A power of two does not round, and reaches bounds that gradients now keep."""


class Fusion:
    """Decides after the first step whether microbatches are fused, that is, computed in one pass.

    In steps in which workers send samples they are not, because each microbatch may come from another worker.

    Args:
        together: whether all workers decide together. Otherwise each worker decides for its own steps.
    """

    def __init__(self, context: TrainingContext, together: bool = True) -> None:
        settings, known = context.settings, context.probe_results.fusible
        single = (
            settings.exact or settings.keeps_errors or settings.microbatches is not None or context.collate is not None
        )
        single = single or context.compute.carried is not None or context.compute.batch_loss is not None
        self._context = context
        self._together = together
        self._fused = bool(known)
        self._open = not single and context.order.microbatches > 1 and known is None
        self._drew = False

    def groups(self, share: range, step: int) -> list[range]:
        """Return the groups in which a share of the microbatches of a step is computed."""
        if self._fused and not self._context.order.sends(step):
            return [share] if share else []
        return [range(microbatch, microbatch + 1) for microbatch in share]

    def forward(self, group: MicrobatchGroup, step: int) -> ForwardResult:
        """Run the forward pass of a microbatch group; see :meth:`ForwardRunner.forward_pass`."""
        compute = self._context.compute
        if len(group.microbatches) > 1:
            if not self._drew and self._context.probe_results.fusible:
                computed = compute.forward_pass(group, step, watch_draws=True)
                if not computed.drew:
                    return computed
                self._drew = True
            return self._apart(group, step)
        computed = compute.forward_pass(group, step, watch_draws=self._decides(step))
        self._drew |= computed.drew
        return computed

    def _apart(self, group: MicrobatchGroup, step: int) -> ForwardResult:
        """Run the forward passes of the microbatches of a group one by one. Returns their sum."""
        compute = self._context.compute
        recorder, compute.recorder = compute.recorder, None  # the backward pass is one for all of them
        if recorder is not None:
            recorder.close()
        try:
            single = [compute.forward_pass(one, step) for one in split_group(group, self._context.order.parts_of(step))]
        finally:
            compute.recorder = recorder
        total = torch.stack([one.total for one in single]).sum()
        buffers = [torch.stack(values).sum(0) for values in zip(*(one.buffers for one in single), strict=True)]
        return ForwardResult(total, torch.stack([one.pair for one in single]).sum(0), buffers)

    def _decides(self, step: int) -> bool:
        return self._open and not self._context.order.sends(step)

    def decide(self, step: int, groups: list[MicrobatchGroup], pairs: torch.Tensor) -> None:
        """Compute the first step's loss again in one pass once its gradients are known, and decide whether to fuse.

        Args:
            pairs: float64 tensor of shape [groups, 2 + 2 * metrics], sums of losses and counts, and of metrics.
        """
        if not self._decides(step):
            return
        obstacle = self._obstacle(groups, pairs)
        everyone = self._context.world.gather(obstacle, "step") if self._together else [obstacle]
        obstacles = [reason for reason in everyone if reason]
        self._open = False
        self._fused = self._context.probe_results.fusible = not obstacles
        text = (
            f"microbatches are computed one by one: {obstacles[0]}"
            if obstacles
            else "each worker computes its microbatches in one pass"
        )
        _log.info(text)
        self._context.events.mark("note", text=text, fused=self._fused)

    def _obstacle(self, groups: list[MicrobatchGroup], pairs: torch.Tensor) -> str:
        compute = self._context.compute
        if self._drew:
            return "the forward pass draws random numbers"
        if compute.buffers.live:
            return "the forward pass changes buffers"
        if len(groups) < 2:
            return ""
        data = concatenated([group.data for group in groups])
        if data is None:
            return "the data are not tensors that can be concatenated"
        together = MicrobatchGroup(groups[0].microbatches, sum(group.samples for group in groups), data)
        return self._differs(together, pairs.sum(0)) or self._gradients_differ(groups[:2])

    def _differs(self, together: MicrobatchGroup, single: torch.Tensor) -> str:
        """Describe how the loss of one pass differs from the sum over microbatches. Empty if it does not."""
        try:
            with without_trace(self._context):
                fused = self._context.compute.loss_only(together)
        except Exception as error:  # noqa: BLE001 - a model may accept only one number of samples
            return f"the forward pass of several at once raises {type(error).__name__}: {error}"
        tolerance = self._tolerance()
        near = torch.isclose(fused, single.to(fused.device), rtol=tolerance, atol=0.0)
        if near[:2].all():
            return "" if near.all() else "the metrics in one pass are not those of the microbatches"
        return f"the loss in one pass is {_mean(fused):.9g} instead of {_mean(single):.9g}"

    def _gradients_differ(self, groups: list[MicrobatchGroup]) -> str:
        """Describe how the gradients of two microbatches in one pass differ from their sum. Empty if they do not.

        They differ if hooks or autograd functions clip or normalize the gradients of a pass.
        """
        data = concatenated([group.data for group in groups])
        together = MicrobatchGroup(groups[0].microbatches, sum(group.samples for group in groups), data)
        dtypes = {value.dtype for value in self._context.update.parameters.values()}
        half = torch.float16 in dtypes or self._context.settings.autocast == "float16"
        try:
            with without_trace(self._context):
                single = add(self._gradients(groups[0], 1.0), self._gradients(groups[1], 1.0))
                scaled = (self._gradients(together, factor) for factor in ((1.0,) if half else (_UP, 1.0)))
                fused = next(filter(_are_finite, scaled), None)
        except Exception as error:  # noqa: BLE001 - a hook may raise anything
            return f"the backward pass of several at once raises {type(error).__name__}: {error}"
        if fused is None or not _are_finite(single):
            return "the gradients are not finite"
        rounded = _OF_GRADIENTS_AUTOCAST if self._context.settings.autocast else 0.0
        tolerance = max(rounded, *(_OF_GRADIENTS.get(dtype, _OF_GRADIENTS_AUTOCAST) for dtype in dtypes))
        place = _first_difference(single, fused, tolerance)
        if place is None:
            return ""
        name = list(self._context.update.parameters)[place]
        return f"the gradient of {name!r} in one pass is not the sum of those of the microbatches"

    def _gradients(self, group: MicrobatchGroup, factor: float) -> Values:
        """Return the gradients of a microbatch group, computed for a multiple of the loss."""
        parameters = list(self._context.update.parameters.values())
        for value in parameters:
            value.grad = None
        own = replace(group, data=copy.deepcopy(group.data))  # which the forward pass may change
        (self._context.compute.loss_of(own)[0] * factor).backward()
        found = [None if value.grad is None or value.grad.is_sparse else value.grad / factor for value in parameters]
        for value in parameters:
            value.grad = None
        return found

    def _tolerance(self) -> float:
        if self._context.settings.autocast:
            return _TOLERANCE_AUTOCAST
        dtype = next(iter(self._context.update.parameters.values())).dtype
        return _TOLERANCE.get(dtype, _TOLERANCE_AUTOCAST)


def _mean(pair: torch.Tensor) -> float:
    return float(pair[0] / pair[1])


def _are_finite(gradients: Values) -> bool:
    return all(bool(value.isfinite().all()) for value in gradients if value is not None)


def _first_difference(left: Values, right: Values, tolerance: float) -> int | None:
    """Return the index of the first gradient that differs by more than rounding, or None if all are near."""
    norms = [0.0 if value is None else float(value.norm()) for value in left]
    noise = 0.01 * math.hypot(*norms)  # gradients that cancel out are nothing but rounding
    for place, (one, other) in enumerate(zip(left, right, strict=True)):
        if one is None or other is None:
            differs = one is not other
        else:
            differs = float((one - other).norm()) > tolerance * (norms[place] + noise)
        if differs:
            return place
    return None
