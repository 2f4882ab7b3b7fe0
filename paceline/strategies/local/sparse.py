"""Outer gradients of which only the largest numbers are sent, in 2 bits, with error feedback.

SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706)::

    rest = 0.95 * rest + outer gradient ──┬── largest numbers of each block: positions, signs and sizes ── all-gather
       ▲                                  │                                    │
       └──────────────────────────────── minus ────────────────────────────────┘

The rest belongs to the replica, so it is saved and handed over with it. Every worker adds up the messages of all
replicas in their order, so the sum does not depend on the workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from paceline.comm.collectives.all_gather import AllGather, PendingGather
from paceline.comm.collectives.step_header import LARGEST_TAG
from paceline.comm.collectives.subgroup import Subgroup
from paceline.comm.reduction.division import Divisor
from paceline.comm.reduction.executor import Reduction
from paceline.errors import ConfigError
from paceline.schedule.tree import Node
from paceline.settings import Settings
from paceline.step.context import TrainingContext
from paceline.step.gradients.accumulate import Values
from paceline.strategies.data_parallel.reducer import Reducer
from paceline.strategies.local.replica import Replica
from paceline.system.wires import OUTER

_DECAY = 0.95
"""Part of the rest that is kept for the next outer step, as in the paper."""
_BLOCK = 256
"""Number of values in a block, whose positions then have 8 bits."""
_GROUP = 16
"""Number of blocks in a group, which has one small and one large size for all its values, each in 16 bits."""


def validate(settings: Settings, model: nn.Module) -> None:
    """Raise ConfigError if the format cannot send all parameters."""
    if OUTER in settings.wires.values() and (settings.wire != OUTER or any(map(torch.is_complex, model.parameters()))):
        raise ConfigError(
            f"wire = {settings.wire!r}: {OUTER} chooses among all numbers of a fragment, which must be real numbers in "
            f"the same format: set wire = {OUTER!r}, or use another format for complex parameters, such as 'float32'."
        )


def encode(values: torch.Tensor, kept: int) -> torch.Tensor:
    """Return a message, in bytes, with the largest numbers of each block of a one-dimensional tensor.

    Args:
        kept: number of values that are sent of each block of 256.

    >>> encode(torch.randn(4096), 4).numel() / 4096 * 8 / (4 / 256)  # bits for each of them
    10.5
    """
    groups = -(-len(values) // (_BLOCK * _GROUP))
    blocks = nn.functional.pad(values, (0, groups * _GROUP * _BLOCK - len(values))).view(-1, _BLOCK)
    at = blocks.abs().topk(kept).indices
    chosen = blocks.gather(1, at).view(groups, -1)
    sizes = chosen.abs()
    inside = at + _BLOCK * torch.arange(len(at), device=at.device).unsqueeze(1) < len(values)
    zeros = ((sizes == 0) & inside.view(groups, -1)).any(1, keepdim=True)  # which are sent as small, so small is 0
    large = sizes > sizes.sum(1, keepdim=True) / (sizes > 0).sum(1, keepdim=True).clamp(min=1)
    large |= zeros & (sizes > 0)
    small = ~large & (sizes != 0)  # NaN is small, and makes that size NaN
    means = [(sizes * one).sum(1) / one.sum(1).clamp(min=1) for one in (small, large)]
    bits = ((chosen < 0) + 2 * large).to(torch.uint8).view(-1, 4)
    codes = (bits << torch.arange(0, 8, 2, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)
    return torch.cat([at.to(torch.uint8).view(-1), codes, torch.stack(means).bfloat16().view(torch.uint8).view(-1)])


def add_message(sums: torch.Tensor, message: torch.Tensor, kept: int) -> None:
    """Add the numbers of a message to a one-dimensional tensor of whole groups."""
    count = len(sums) // _BLOCK * kept
    at, codes, means = message.split([count, count // 4, 4 * (len(sums) // _BLOCK // _GROUP)])
    bits = codes.unsqueeze(1) >> torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device) & 3
    small, large = means.view(torch.bfloat16).float().view(2, -1, 1)
    bits = bits.view(small.shape[0], -1)
    values = torch.where(bits >= 2, large, small)
    values = torch.where(bits % 2 == 1, -values, values)
    sums.view(-1, _BLOCK).scatter_add_(1, at.view(-1, kept).long(), values.view(-1, kept))


class SparseReducer(Reducer):
    """Reducer of the outer gradients of a fragment. Its buffers are reduced like those of :class:`Reducer`.

    Args:
        context: training context.
        parameters: parameters of the fragment.
        workers: this worker if it is alone. Defaults to all workers.
        fragment: number of the fragment, the key of its rest in :attr:`Replica.rests`.
        shares: numbers of the replicas of each rank.
        replicas: replicas of this worker, by number.
    """

    def __init__(
        self, context: TrainingContext, parameters: Mapping[str, nn.Parameter], workers: Subgroup | None,
        fragment: int, shares: Sequence[Sequence[int]], replicas: Mapping[int, Replica],
    ) -> None:  # fmt: skip
        super().__init__(context, parameters, workers, overlap=False)
        self._codec, self.expect = None, None  # messages are encoded here, even with exact = "fixed-point"
        self._values = [*parameters.values()]
        self._fragment, self._shares, self._replicas = fragment, shares, replicas
        self._per_block = max(1, round(context.settings.wire_ratio * _BLOCK))
        numel = sum(value.numel() for value in parameters.values())
        self._padded = -(-numel // (_BLOCK * _GROUP)) * _BLOCK * _GROUP
        own = max(map(len, shares)), len(encode(torch.zeros(numel), self._per_block))
        self._messages = torch.zeros(own, dtype=torch.uint8, device=context.world.device)
        self._gather = AllGather(context.world, LARGEST_TAG, self._messages.nbytes)
        self._pending: PendingGather | None = None
        self._rests: dict[int, torch.Tensor] = {}

    def _reduction_of(self, examples: list[torch.Tensor], name: str, tags: int, any_order: bool) -> Reduction | None:
        return super()._reduction_of(examples, name, tags, any_order) if name == "buffers" else None

    def take(self, step: int = 0, microbatch: int = 0) -> Values:
        """Encode the outer gradient of the replica with the number ``microbatch``, and clear ``.grad``."""
        values = [value.float().reshape(-1) for value in super().take() if value is not None]
        replica, rest = self._replicas[microbatch], torch.cat(values)
        if (before := replica.rests.get(self._fragment)) is not None:
            rest.add_(before, alpha=_DECAY)
        message = self._messages[[*self._replicas].index(microbatch)]
        message.copy_(encode(rest, self._per_block))
        self._rests[microbatch] = rest - self._sum([message])[: len(rest)]
        return []

    def send(
        self, nodes: list[list[Node]], sums: list[Values], count: Callable[[], Divisor], held: bool = False
    ) -> None:
        """Send the messages of this worker's replicas to all workers."""
        self._pending = self._gather.start(self._messages)

    def finish(self, measure: bool = False) -> bool:
        """Wait for the messages of all replicas, and put their sums into ``.grad``."""
        assert self._pending is not None
        begin = time.perf_counter()
        everyone = self._pending.wait()
        nbytes, seconds = self._messages.nbytes, time.perf_counter() - begin
        self._context.events.mark("exchange", what="gradients", bytes=nbytes, seconds=seconds)
        found = self._sum(
            [own[at] for share, own in zip(self._shares, everyone, strict=True) for at in range(len(share))]
        )
        start = 0
        for value in self._values:
            value.grad = found[start : start + value.numel()].view(value.shape).to(value.dtype)
            start += value.numel()
        return True

    def accept(self, applied: bool = True) -> None:
        """Keep the unsent rests of the replicas, unless no update was made with the sent parts."""
        for number, rest in self._rests.items() if applied else ():
            self._replicas[number].rests[self._fragment] = rest

    def _sum(self, messages: Sequence[torch.Tensor]) -> torch.Tensor:
        found = torch.zeros(self._padded, device=self._messages.device)
        for one in messages:
            add_message(found, one, self._per_block)
        return found
