"""The header that each worker sends in each step: the step, a notice about the world, seconds, and losses."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from paceline.comm.all_gather import AllGather
from paceline.errors import DisagreementError

HEADER_TAG, MISSING_TAG, NORMS_TAG = 1, 2, 3
"""Tags of the step header, of the table of missing gradients that may follow it, and of the norms of gradients."""

_ROWS, _ROW_BYTES = 3, 24
"""Rows before those of the pieces; bytes of each row, of three float64."""


def header_bytes(pieces: int) -> int:
    """The bytes of a header with room for so many pieces."""
    return _ROW_BYTES * (_ROWS + pieces)


def check_steps(steps: Sequence[int], allowed: Collection[int]) -> None:
    """Refuse workers at different steps.

    Args:
        steps: the step of each rank.
        allowed: steps at which a worker may be.

    Raises:
        DisagreementError: names the step of each rank.
    """
    if any(step not in allowed for step in steps):
        listed = ", ".join(f"rank {rank} at step {step}" for rank, step in enumerate(steps))
        raise DisagreementError(
            f"The workers are not at the same step: {listed}. Every worker must take the same batches from "
            f"session.batches; look for a loop that leaves or skips early on some ranks only."
        )


class PieceLoss(NamedTuple):
    """The loss of a piece: its first microbatch, who computed it, the sum of its losses, what it is divided by."""

    start: int
    rank: int
    loss: float
    counted: float


class StepHeader:
    """The headers of all workers in one step, sent when this object is made.

    A header has three rows of numbers, then one for each piece: its first microbatch, sum of losses, and count::

        step            notice                    seconds that the worker computed
        operations      lines of the script       whether a gradient is missing       (comm.desync.recorder)
        pieces          sum over the state: its upper and its lower 32 bits           (step.replicas)

    Args:
        gather: sends them; of :func:`header_bytes`.
        step: the number of the step.
        starts: the first microbatch of each piece that this worker has computed.
        pairs: for each of them a float64 tensor [sum, count].
        device: of the worker.
        seconds: that this worker has computed.
        missing: whether one of its pieces gave no gradient to a parameter, if that is known.
        state_digest: over bits of the state of this worker, 64 bits; the same on all that hold the same.

    Attributes:
        notice: about the world, from any worker: it is about to change, or one leaves. Known after :meth:`check`, as
            are the next three.
        seconds: how long each worker computed.
        missing: whether a piece of any worker gave no gradient to a parameter.
        state_digests: of each worker.
    """

    def __init__(  # noqa: PLR0913 - it is what a worker has to say
        self,
        gather: AllGather,
        step: int,
        starts: list[int],
        pairs: list[torch.Tensor],
        device: torch.device,
        seconds: float = 0.0,
        missing: bool = True,
        state_digest: int = 0,
    ) -> None:
        self._step = step
        self._world = gather.world
        recorder = self._world.recorder
        made = recorder.meet("session.step", f"step {step}") if recorder else (0.0, 0.0)
        rows = ((step, self._world.notice(), seconds), (*made, missing), (len(pairs), *divmod(state_digest, 1 << 32)))
        # the same size in all steps: workers at different steps must be able to say so
        own = torch.zeros((gather.size // _ROW_BYTES, 3), dtype=torch.float64, device=device)
        own[:_ROWS] = torch.tensor(rows, dtype=torch.float64)
        if pairs:
            own[_ROWS : _ROWS + len(pairs), 0] = torch.tensor(starts, dtype=torch.float64)
            own[_ROWS : _ROWS + len(pairs), 1:] = torch.stack(pairs)
        self._pending = gather.start(own)
        self._losses: list[PieceLoss] | None = None
        self.notice = 0
        self.seconds: list[float] = []
        self.missing = True
        self.state_digests: list[int] = []

    def check(self) -> None:
        """Wait for the headers of all workers, and refuse workers that do not do the same.

        Raises:
            DisagreementError: workers are at different steps, or called different operations of
                ``torch.distributed`` before; names the ranks and what they did.
        """
        if self._losses is not None:
            return
        with self._world.awaiting("in the exchange of losses"):
            tables = self._pending.wait().tolist()
        headers = [table[:_ROWS] for table in tables]
        check_steps([int(header[0][0]) for header in headers], {self._step})
        self.notice = max(int(header[0][1]) for header in headers)
        self.seconds = [header[0][2] for header in headers]
        self.missing = any(header[1][2] for header in headers)
        self.state_digests = [(int(header[2][1]) << 32) + int(header[2][2]) for header in headers]
        if self._world.recorder is not None:
            self._world.recorder.check_agreement([(header[1][0], header[1][1]) for header in headers])
        self._losses = sorted(
            PieceLoss(int(start), rank, loss, count)
            for rank, table in enumerate(tables)
            for start, loss, count in table[_ROWS : _ROWS + int(headers[rank][2][0])]
        )

    def losses(self) -> list[PieceLoss]:
        """The losses of the pieces of all workers, in the order of microbatches; after :meth:`check`."""
        self.check()
        assert self._losses is not None
        return self._losses

    def count(self) -> float:
        """What the sum of all gradients is to be divided by."""
        return math.fsum(piece.counted for piece in self.losses())
