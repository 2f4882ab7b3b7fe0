"""Digest of each step: the chain of losses, and now and then a part of the parameters.

::

    step             0          1      ...     16      ...     32
    loss             │          │               │               │        of the whole batch
    chain       ""  ─┴────> c0 ─┴────> c1  ... ─┴────> c16 ... ─┴────> c32
    parameters     a[0:]                    a[256K:]            b        in turn, up to 1 MB of float32

Equal chains after step t mean equal losses in all steps up to t. All workers have the loss, so the chain does not
depend on the strategy; a digest of a parameter in the chain would, as in a pipeline only one worker holds it. That one
records the digest. The norm of the gradients is not in the chain, because ``sharded`` without ``clip_norm`` rounds it
differently with other workers. Strategies that depend on the number of workers, or whose replicas have losses of their
own, have no chain.
"""

from __future__ import annotations

import hashlib
import math
import struct

import torch

from paceline.step.context import StepResult, TrainingContext
from paceline.step.replicas import digest_of
from paceline.strategies.base import Strategy
from paceline.strategies.registry import capabilities

_ELEMENTS = 1 << 18  # maximum number of elements in a digest, which reads 20 GB/s in the cache, so it takes 0.05 ms
_EVERY = 16  # steps from one digest of parameters to the next: on a busy machine, with a cold cache, one takes 0.1 ms


class StepDigests:
    """Digests of the steps of a run. Build this before the strategy, which may release parameters."""

    def __init__(self, context: TrainingContext) -> None:
        able = capabilities(context.settings, 2)  # not with the current number of workers: it may change
        self._chains = able.exact and not able.replicas
        self._parts = [
            (name, value, start)
            for name, value in context.update.parameters.items()
            for start in range(0, max(1, value.numel()), _ELEMENTS)
        ]

    def after(self, chain: str, step: int, result: StepResult, strategy: Strategy) -> dict[str, str]:
        """Return the fields for the record of a step that was just taken. Empty if they depend on the workers.

        Args:
            chain: chain after the step before; empty before the first step.
        """
        if not self._chains:
            return {}
        fields = {"chain": chained(chain, step, result.loss)}
        if self._parts and not step % _EVERY:
            name, value, start = self._parts[step // _EVERY % len(self._parts)]
            held = strategy.held
            if held is None or name in held:
                fields["tensor"] = f"{name}[{start}:]" if value.numel() > _ELEMENTS else name
                fields["digest"] = f"{digest_of(_part(value, start)):016x}"
        return fields


def _part(value: torch.Tensor, start: int) -> torch.Tensor:
    return value if value.numel() <= _ELEMENTS else value.detach().reshape(-1)[start : start + _ELEMENTS]


def chained(chain: str, step: int, loss: float) -> str:
    """Return the chain after a step.

    >>> chained(chained("", 0, 0.5), 1, float("nan"))
    '8687e6adedbb92e2'
    """
    loss = loss if loss == loss else math.nan  # NaNs have many bit patterns
    packed = struct.pack("<16sqd", chain.encode(), step, loss)
    return hashlib.blake2b(packed, digest_size=8).hexdigest()
