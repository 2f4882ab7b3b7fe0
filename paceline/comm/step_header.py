"""The header that each worker sends in each step: the step, a notice about the world, seconds, and losses."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from paceline.comm.all_gather import AllGather, PendingGather
from paceline.comm.host_copy import HostCopy
from paceline.comm.world import World
from paceline.errors import DisagreementError

HEADER_TAG, MISSING_TAG, NORMS_TAG, LOSSES_TAG, LARGEST_TAG = 1, 2, 3, 4, 5
"""Tags of the step header, of the table of missing gradients that may follow it, of the norms of gradients, of what the
header has on the device, and of the largest gradients."""

_LOWER = (1 << 32) - 1

_ROWS, _ROW_BYTES = 3, 24
"""Rows before those of the pieces; bytes of each row, of three float64."""


def header_bytes(pieces: int) -> int:
    """The bytes of the header of one worker, with room for so many pieces."""
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


class StateDigest(NamedTuple):
    """A sum over the bits of the state of a worker: of what is on the host, and of what is on its device, if any."""

    host: int = 0
    device: torch.Tensor | None = None


class StepHeader:
    """The headers of all workers in one step, sent when this object is made.

    A header has three rows of numbers, then one for each piece: its first microbatch, sum of losses, and count::

        step            notice                    seconds that the worker computed
        operations      lines of the script       whether a gradient is missing       (comm.desync.recorder)
        pieces          sum over the state: its upper and its lower 32 bits           (step.replicas)

    On an accelerator the sums of losses, the counts, and the sum over the state are known to the device alone. They go
    in a message of their own, from device to device, and stay there: :meth:`count` is what is needed of them before
    the update, and :meth:`read` copies all of them to the host at once. So nobody waits for a device to know that all
    are at the same step.

    Args:
        gather: sends what the hosts know; of :func:`header_bytes`.
        step: the number of the step.
        starts: the first microbatch of each piece that this worker has computed.
        pairs: for each of them a float64 tensor [sum, count].
        seconds: that this worker has computed.
        missing: whether one of its pieces gave no gradient to a parameter, if that is known.
        digest: of the state of this worker; the same on all that hold the same.

    Attributes:
        notice: about the world, from any worker: it is about to change, or one leaves. Known after :meth:`check`, as
            are the next three.
        seconds: how long each worker computed.
        missing: whether a piece of any worker gave no gradient to a parameter.
        starts: the first microbatch of each piece that each worker has computed.
    """

    def __init__(
        self,
        gather: AllGather,
        step: int,
        starts: list[int],
        pairs: list[torch.Tensor],
        seconds: float = 0.0,
        missing: bool = True,
        digest: StateDigest | None = None,
    ) -> None:
        self._step = step
        self._world = world = gather.world
        digest = digest or StateDigest()
        recorder = world.recorder
        made = recorder.meet("session.step", f"step {step}") if recorder else (0.0, 0.0)
        rows = ((step, world.notice(), seconds), (*made, missing), (len(pairs), *divmod(digest.host, 1 << 32)))
        # the same size in all steps: workers at different steps must be able to say so
        own = torch.zeros((gather.size // _ROW_BYTES, 3), dtype=torch.float64)
        assert len(starts) == len(pairs) <= len(own) - _ROWS, f"{len(starts)} pieces, room for {len(own) - _ROWS}"
        own[:_ROWS] = torch.tensor(rows, dtype=torch.float64)
        if starts:
            own[_ROWS : _ROWS + len(starts), 0] = torch.tensor(starts, dtype=torch.float64)
        self._on_device: PendingGather | None = None
        if world.device.type != "cpu":
            self._on_device = _start_on_device(world, own.shape[0] - _ROWS, pairs, digest.device)
        elif pairs:
            own[_ROWS : _ROWS + len(pairs), 1:] = torch.stack(pairs)
        self._pending = gather.start(own)
        self._tables: list[list[list[float]]] | None = None
        self._copy: HostCopy | None = None
        self._losses: list[PieceLoss] | None = None
        self.notice = 0
        self.seconds: list[float] = []
        self.missing = True
        self.starts: list[list[int]] = []

    def check(self) -> None:
        """Wait for the headers of all workers, and refuse workers that do not do the same.

        Raises:
            DisagreementError: workers are at different steps, or called different operations of
                ``torch.distributed`` before; names the ranks and what they did.
        """
        if self._tables is not None:
            return
        with self._world.awaiting("in the exchange of losses"):
            self._tables = self._pending.wait().tolist()
        headers = [table[:_ROWS] for table in self._tables]
        check_steps([int(header[0][0]) for header in headers], {self._step})
        self.notice = max(int(header[0][1]) for header in headers)
        self.seconds = [header[0][2] for header in headers]
        self.missing = any(header[1][2] for header in headers)
        self.starts = [[int(row[0]) for row in table[_ROWS : _ROWS + int(table[2][0])]] for table in self._tables]
        if self._world.recorder is not None:
            self._world.recorder.check_agreement([(header[1][0], header[1][1]) for header in headers])

    @property
    def on_device(self) -> bool:
        """Whether losses and counts are on the devices of the workers until they are read."""
        return self._on_device is not None

    def count(self) -> torch.Tensor | float:
        """What the sum of all gradients is to be divided by: a scalar tensor, where only the device knows it."""
        if self._on_device is not None:
            self.check()
            with self._world.awaiting("in the exchange of losses"):
                return self._on_device.wait()[:, 1:, 1].sum()
        return math.fsum(piece.counted for piece in self.losses())

    def read(self, norm: torch.Tensor | None = None) -> None:
        """Start to copy to the host what the devices have exchanged; the only copy of a step.

        Args:
            norm: a scalar that goes with it, for :meth:`norm`.
        """
        if self._on_device is not None and self._copy is None:
            self.check()
            with self._world.awaiting("in the exchange of losses"):
                values = self._on_device.wait().flatten()
            self._copy = HostCopy(values if norm is None else torch.cat((values, norm.double().reshape(1))))

    def norm(self) -> float:
        """The norm that was given to :meth:`read`."""
        assert self._copy is not None
        return float(self._copy.wait()[-1])

    def losses(self) -> list[PieceLoss]:
        """The losses of the pieces of all workers, in the order of microbatches; after :meth:`check`."""
        if self._losses is None:
            self.check()
            self._losses = sorted(
                PieceLoss(start, rank, loss, count)
                for rank, (starts, pairs) in enumerate(zip(self.starts, self._pairs(), strict=True))
                for start, (loss, count) in zip(starts, pairs, strict=False)
            )
        return self._losses

    def _pairs(self) -> list[list[list[float]]]:
        """For each worker the sum and the count of each of its pieces, and what has no meaning behind them."""
        assert self._tables is not None
        if self._on_device is None:
            return [[row[1:] for row in table[_ROWS:]] for table in self._tables]
        return [table[1:] for table in self._device_tables()]

    def _device_tables(self) -> list[list[list[float]]]:
        """What the device of each worker has sent."""
        self.read()
        assert self._copy is not None and self._on_device is not None
        shape = self._on_device.wait().shape
        tables: list[list[list[float]]] = self._copy.wait()[: shape.numel()].view(shape).tolist()
        return tables

    def state_digests(self) -> list[int]:
        """The sum over the state of each worker, 64 bits."""
        self.check()
        assert self._tables is not None
        sums = [_joined(*table[2][1:]) for table in self._tables]
        if self._on_device is not None:
            sums = [host + _joined(*table[0]) for host, table in zip(sums, self._device_tables(), strict=True)]
        return [one % (1 << 64) for one in sums]


def _start_on_device(world: World, most: int, pairs: list[torch.Tensor], digest: torch.Tensor | None) -> PendingGather:
    """Send what only the device knows: halves of the sum over the state, then a row for each piece."""
    own = torch.zeros((1 + most, 2), dtype=torch.float64, device=world.device)
    if digest is not None:
        own[0] = torch.stack((digest >> 32, digest)) & _LOWER
    if pairs:
        own[1 : 1 + len(pairs)] = torch.stack(pairs)
    return AllGather(world, LOSSES_TAG, 16 * (1 + most)).start(own)


def _joined(upper: float, lower: float) -> int:
    return (int(upper) << 32) + int(lower)
