"""Digest of each step: a part of the parameters in turn, chained with the loss and the norm of the gradients.

::

    step             0          1          2          3          4
    parameters     a[0:]      a[256K:]     b          c         a[0:]     up to 1 MB of float32 in each step
    chain       ""  ─────> c0  ─────> c1  ─────> c2  ─────> c3  ─────> c4

Equal chains after step t mean equal losses, norms and digests in all steps up to t. Where each worker has a part of the
model only (a pipeline), or of the optimizer's state (sharded), the chain has losses and norms, and the worker that
holds the parameter records its digest. Strategies that depend on the number of workers have no chain.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from paceline.step.context import StepResult, TrainingContext
from paceline.step.replicas import digest_of
from paceline.strategies.base import Strategy
from paceline.strategies.registry import capabilities

_ELEMENTS = 1 << 18
"""Maximum number of elements in a step's digest: a digest reads 20 GB/s in the cache, so it takes 0.05 ms."""


@dataclass(frozen=True)
class StepDigest:
    """Digest of a step, as in its record."""

    chain: str
    tensor: str  # parameter, with the index of the first element if it is not the whole parameter
    digest: str  # empty if this worker does not hold the parameter

    def fields(self) -> dict[str, str]:
        """Return the fields of the step's record."""
        held = {"tensor": self.tensor, "digest": self.digest} if self.digest else {}
        return held | {"chain": self.chain}


class StepDigests:
    """Digests of the steps of a run. Build this before the strategy, which may release parameters."""

    def __init__(self, context: TrainingContext) -> None:
        able = capabilities(context.settings, 2)  # not the current number of workers, which may change
        self._chains, self._folds = able.exact, able.replicated
        self._parts = [
            (name, value, start)
            for name, value in context.update.parameters.items()
            for start in range(0, max(1, value.numel()), _ELEMENTS)
        ]

    def after(self, chain: str, step: int, result: StepResult, strategy: Strategy) -> StepDigest | None:
        """Return the digest of a step that was just taken, or None if it depends on the number of workers.

        Args:
            chain: chain after the step before; empty before the first step.
        """
        if not self._chains:
            return None
        name, value, start = self._parts[step % len(self._parts)]
        held = strategy.held
        digest = f"{digest_of(_part(value, start)):016x}" if held is None or name in held else ""
        norm = float(result.norm)
        return StepDigest(
            chained(chain, step, result.loss, norm, digest if self._folds else ""),
            f"{name}[{start}:]" if start or value.numel() > _ELEMENTS else name,
            digest,
        )


def _part(value: torch.Tensor, start: int) -> torch.Tensor:
    return value if value.numel() <= _ELEMENTS else value.detach().reshape(-1)[start : start + _ELEMENTS]


def chained(chain: str, step: int, loss: float, norm: float, digest: str) -> str:
    """Return the chain after a step.

    >>> chained("", 0, 0.5, 2.0, "00ff")
    '0b0b'
    """
    text = f"{chain} {step} {float(loss).hex()} {norm.hex()} {digest}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
