"""The header that each worker sends in each step: the step, a notice about the world, seconds, losses and metrics."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from paceline.comm.collectives.all_gather import AllGather, PendingGather
from paceline.comm.transport.host_copy import HostCopy
from paceline.comm.world import World
from paceline.errors import DisagreementError, InputError

HEADER_TAG, MISSING_TAG, NORMS_TAG, LOSSES_TAG, LARGEST_TAG, PHASE_TAG = 1, 2, 3, 4, 5, 6
"""Tags of the step header, of the table of missing gradients that may follow it, of the norms of gradients, of what the
header has on the device, of the largest gradients, and of the phase of a batch."""

_LOWER = (1 << 32) - 1

_ROWS, _COLUMNS = 4, 3
"""Rows before those of the pieces; columns of each row, float64, without metrics."""


def header_bytes(pieces: int, metrics: int = 0) -> int:
    """The bytes of the header of one worker, with room for so many pieces and their metrics."""
    return 8 * (_COLUMNS + 2 * metrics) * (_ROWS + pieces)


class Headers:
    """Sends the headers of all steps of a strategy.

    In its first step nobody knows of metrics; if there are any, the workers agree on their names at the end of that
    step (:meth:`StepHeader.metrics`), and from the next one on each row has room for them.

    Args:
        world: the workers.
        pieces: how many a worker has in a step at most.

    Attributes:
        metrics: the names of the metrics for which headers have room.
        own: the names of the metrics of this worker's pieces; None: it has computed nothing yet.
        audited: whether this worker takes the next step for an audited one.
    """

    def __init__(self, world: World, pieces: int) -> None:
        self.world = world
        self.pieces = pieces
        self.own: tuple[str, ...] | None = None
        self.audited = False
        self.agree(())

    def agree(self, metrics: tuple[str, ...]) -> None:
        """Make room for these metrics; all workers call this between the same steps."""
        self.metrics = metrics
        self.gather = AllGather(self.world, HEADER_TAG, header_bytes(self.pieces, len(metrics)), host=True)


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

    A header has four rows of numbers, then one for each piece: its first microbatch, sum of losses, and count, then the
    sum and count of each metric::

        step            notice                    seconds that the worker computed
        operations      lines of the script       whether a gradient is missing       (comm.desync.recorder)
        pieces          sum over the state: its upper and its lower 32 bits           (step.replicas)
        metrics: a hash     whether it is audited

    Where tensors are not on the host, the sums of losses, the counts, and the sum over the state are known to the
    device alone. They go in a message of their own, from device to device, and stay there: :meth:`count` is what is
    needed of them before the update, and :meth:`read` copies all of them to the host at once. So nobody waits for a
    device to know that all are at the same step.

    Args:
        headers: sends what the hosts know.
        step: the number of the step.
        starts: the first microbatch of each piece that this worker has computed.
        pairs: for each of them a float64 tensor [sum, count, and the same two of each metric].
        seconds: that this worker has computed.
        missing: whether one of its pieces gave no gradient to a parameter, if that is known.
        digest: of the state of this worker; the same on all that hold the same.

    Attributes:
        notice: about the world, from any worker: it is about to change, or one leaves. Known after :meth:`check`, as
            are the next four.
        seconds: how long each worker computed.
        missing: whether a piece of any worker gave no gradient to a parameter.
        starts: the first microbatch of each piece that each worker has computed.
        audited: whether any worker takes the step for an audited one.
    """

    def __init__(
        self,
        headers: Headers,
        step: int,
        starts: list[int],
        pairs: list[torch.Tensor],
        seconds: float = 0.0,
        missing: bool = True,
        digest: StateDigest | None = None,
    ) -> None:
        self._step = step
        self._headers = headers
        self._own = headers.own, pairs
        self._world = world = headers.world
        digest = digest or StateDigest()
        recorder = world.recorder
        made = recorder.meet("session.step", f"step {step}") if recorder else (0.0, 0.0)
        state = len(pairs), *divmod(digest.host, 1 << 32)
        rows = (
            (step, world.notice(), seconds),
            (*made, missing),
            state,
            (_hash(headers.own or ()), headers.audited, 0.0),
        )
        # the same size in all steps: workers at different steps must be able to say so
        own = torch.zeros((_ROWS + headers.pieces, _COLUMNS + 2 * len(headers.metrics)), dtype=torch.float64)
        assert len(starts) == len(pairs) <= headers.pieces, f"{len(starts)} pieces, room for {headers.pieces}"
        own[:_ROWS, :_COLUMNS] = torch.tensor(rows, dtype=torch.float64)
        if headers.own and headers.own != headers.metrics:
            pairs = [pair[:2] for pair in pairs]
        if starts:
            own[_ROWS : _ROWS + len(starts), 0] = torch.tensor(starts, dtype=torch.float64)
        self._on_device: PendingGather | None = None
        if not world.transport.capabilities.on_host:
            self._on_device = _start_on_device(headers, pairs, digest.device)
        elif pairs:
            table = torch.stack(pairs)
            own[_ROWS : _ROWS + len(pairs), 1 : 1 + table.shape[1]] = table
        self._pending = headers.gather.start(own)
        self._tables: list[list[list[float]]] | None = None
        self._copy: HostCopy | None = None
        self._losses: list[PieceLoss] | None = None
        self._hashes: list[float] = []
        self.notice = 0
        self.seconds: list[float] = []
        self.missing = True
        self.starts: list[list[int]] = []
        self.audited = False

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
        self._hashes = [header[3][0] for header in headers]
        self.audited = any(header[3][1] for header in headers)
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
                for start, (loss, count, *_) in zip(starts, pairs, strict=False)
            )
        return self._losses

    def metrics(self) -> dict[int, tuple[float, ...]]:
        """The metrics of the pieces of all workers, by the first microbatch; all call this before the next step.

        Raises:
            InputError: workers have metrics of different names; says which.
        """
        self.check()
        if set(self._hashes) == {_hash(self._headers.metrics)}:
            rows = [[tuple(row[2:]) for row in pairs] for pairs in self._pairs()] if self._headers.metrics else []
            everyone = list(zip(self.starts, rows, strict=False))
        else:
            own, pairs = self._own
            values = [pair[2:].cpu().tolist() for pair in pairs]
            gathered = self._world.gather((own, self.starts[self._world.rank], values), "step")
            self._headers.agree(
                agreed_names([(rank, names) for rank, (names, *_) in enumerate(gathered) if names is not None])
            )
            everyone = [(starts, [tuple(row) for row in rows]) for _, starts, rows in gathered]
        return {start: row for starts, rows in everyone for start, row in zip(starts, rows, strict=False)}

    def _pairs(self) -> list[list[list[float]]]:
        """For each worker sum, count and metrics of each of its pieces, then rows without a meaning."""
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

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics, after :meth:`metrics`."""
        return self._headers.metrics

    def state_digests(self) -> list[int]:
        """The sum over the state of each worker, 64 bits."""
        self.check()
        assert self._tables is not None
        sums = [_joined(*table[2][1:3]) for table in self._tables]
        if self._on_device is not None:
            sums = [host + _joined(*table[0][:2]) for host, table in zip(sums, self._device_tables(), strict=True)]
        return [one % (1 << 64) for one in sums]


def _start_on_device(headers: Headers, pairs: list[torch.Tensor], digest: torch.Tensor | None) -> PendingGather:
    """Send what only the device knows: halves of the sum over the state, then a row for each piece."""
    world, columns = headers.world, 2 + 2 * len(headers.metrics)
    own = torch.zeros((1 + headers.pieces, columns), dtype=torch.float64, device=world.device)
    if digest is not None:
        own[0, :2] = torch.stack((digest >> 32, digest)) & _LOWER
    if pairs:
        table = torch.stack(pairs)
        own[1 : 1 + len(pairs), : table.shape[1]] = table
    return AllGather(world, LOSSES_TAG, 8 * own.numel()).start(own)


def _hash(names: tuple[str, ...]) -> float:
    """A whole number below 2**48 that stands for names; 0 for none."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=6).digest()
    return float(int.from_bytes(digest, "little")) if names else 0.0


def agreed_names(known: list[tuple[int, tuple[str, ...]]]) -> tuple[str, ...]:
    """The names of the metrics of some ranks.

    Raises:
        InputError: they differ; names two workers and what they have.
    """
    (first, names), *others = known
    for rank, other in others:
        if other != names:
            raise InputError(
                f"The workers' forward passes return different metrics: {_listed(names)} on rank {first}, "
                f"{_listed(other)} on rank {rank}. Return the same names for every microbatch, whatever the rank."
            )
    return names


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _joined(upper: float, lower: float) -> int:
    return (int(upper) << 32) + int(lower)
