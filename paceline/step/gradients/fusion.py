"""Fusion of neighboring microbatches into one forward pass, if that does not change the result.

One large pass is faster than several small passes (1.2 to 1.4 times for small models on a CPU). It gives the same
result up to rounding only if samples do not influence each other: no dropout (its random numbers belong to a
microbatch), no batch statistics, no loss over pairs of samples. The first step decides: its microbatches are computed
one by one, then its loss is computed once more in one pass.
"""

from __future__ import annotations

import logging
from itertools import pairwise

import torch

from paceline.data.feed import Piece
from paceline.data.nested import concatenated
from paceline.step.context import TrainingContext
from paceline.step.forward import ForwardResult
from paceline.step.probes.probe import without_trace

_log = logging.getLogger("paceline")
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
_TOLERANCE_AUTOCAST = 1e-3


class Fusion:
    """Decides after the first step whether microbatches are fused, that is, computed in one pass.

    Args:
        context: training context.
        together: whether all workers decide together. Otherwise each worker decides for its own steps.
    """

    def __init__(self, context: TrainingContext, together: bool = True) -> None:
        settings, known = context.settings, context.probe_results.fusible
        single = settings.exact or settings.microbatches is not None or context.collate is not None
        single = single or context.compute.carried is not None
        self._context = context
        self._together = together
        self._fused = bool(known)
        self._open = not single and context.order.microbatches > 1 and known is None
        self._drew = False

    def pieces(self, share: range, audited: int | None = None) -> list[range]:
        """Return the groups in which a share of microbatches is computed. The audited microbatch is its own group."""
        if self._fused:
            alone = [] if audited is None or audited not in share else [audited, audited + 1]
            ends = [share.start, *alone, share.stop]
            return [range(start, stop) for start, stop in pairwise(ends) if start < stop]
        return [range(microbatch, microbatch + 1) for microbatch in share]

    def forward(self, piece: Piece, step: int) -> ForwardResult:
        """Run the forward pass of a microbatch group; see :meth:`ForwardRunner.forward_pass`."""
        computed = self._context.compute.forward_pass(piece, step, watch_draws=self._open)
        self._drew |= computed.drew
        return computed

    def decide(self, pieces: list[Piece], pairs: torch.Tensor) -> None:
        """Compute the first step's loss again in one pass once its gradients are known, and decide whether to fuse.

        Args:
            pieces: microbatch groups that this worker computed.
            pairs: float64 tensor of shape [pieces, 2 + 2 * metrics], sums of losses and counts, and of metrics.
        """
        if not self._open:
            return
        obstacle = self._obstacle(pieces, pairs)
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
        self._context.events.mark("note", text=text)

    def _obstacle(self, pieces: list[Piece], pairs: torch.Tensor) -> str:
        compute = self._context.compute
        if self._drew:
            return "the forward pass draws random numbers"
        if compute.buffers.live:
            return "the forward pass changes buffers"
        if len(pieces) < 2:
            return ""
        data = concatenated([piece.data for piece in pieces])
        if data is None:
            return "the data are not tensors that can be concatenated"
        return self._differs(Piece(pieces[0].microbatches, sum(piece.samples for piece in pieces), data), pairs.sum(0))

    def _differs(self, together: Piece, single: torch.Tensor) -> str:
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

    def _tolerance(self) -> float:
        if self._context.settings.autocast:
            return _TOLERANCE_AUTOCAST
        dtype = next(iter(self._context.update.parameters.values())).dtype
        return _TOLERANCE.get(dtype, _TOLERANCE_AUTOCAST)


def _mean(pair: torch.Tensor) -> float:
    return float(pair[0] / pair[1])
