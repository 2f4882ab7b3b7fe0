"""Header that each worker sends in each step: step number, membership notice, seconds, losses and metrics."""

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

HEADER_TAG, MISSING_TAG, NORMS_TAG, LOSSES_TAG, LARGEST_TAG, PHASE_TAG, ROWS_TAG, UPDATED_TAG = 1, 2, 3, 4, 5, 6, 7, 8
"""Message tags of the step header, the table of missing gradients that may follow the header, the gradient norms, the
header values on the device, the largest gradients, and the phase of a batch."""

_LOWER = (1 << 32) - 1

_ROWS, _COLUMNS = 4, 3
"""Number of rows before those of the microbatch groups, and number of float64 columns of a row without metrics."""


def header_bytes(groups: int, metrics: int = 0) -> int:
    """Return the size of a worker's header in bytes, with room for this number of microbatch groups and metrics."""
    return 8 * (_COLUMNS + 2 * metrics) * (_ROWS + groups)


class Headers:
    """Sender for the step headers of a strategy.

    The metrics are unknown in the first step. If there are any, the workers agree on their names at the end of that
    step (:meth:`StepHeader.metrics`), and each row has room for them from the next step on.

    Args:
        groups: maximum number of microbatch groups that a worker computes in a step.

    Attributes:
        audited: whether this worker considers the next step an audited step.
        set_by_loop: values that this worker's loop has set, by name.
    """

    def __init__(self, world: World, groups: int) -> None:
        self.world, self.groups = world, groups
        self.own: tuple[str, ...] | None = None
        self.audited = False
        self.set_by_loop: tuple[str, ...] = ()
        self.agree(())

    def agree(self, metrics: tuple[str, ...]) -> None:
        """Make room for these metrics. All workers must call this method between the same two steps."""
        self.metrics = metrics
        self.gather = AllGather(self.world, HEADER_TAG, header_bytes(self.groups, len(metrics)), host=True)


def check_steps(steps: Sequence[int], allowed: Collection[int]) -> None:
    """Raise DisagreementError unless every worker is at an allowed step."""
    if any(step not in allowed for step in steps):
        listed = ", ".join(f"rank {rank} at step {step}" for rank, step in enumerate(steps))
        raise DisagreementError(
            f"The workers are not at the same step: {listed}. Every worker must take the same batches from "
            f"session.batches; look for a loop that leaves or skips early on some ranks only."
        )


class GroupLoss(NamedTuple):
    """Loss of a microbatch group: first microbatch, rank that computed the group, sum of the losses, their count."""

    start: int
    rank: int
    loss: float
    counted: float


class StateDigest(NamedTuple):
    """Checksum over the bits of a worker's state: one sum for the tensors on the host, one for those on its device."""

    host: int = 0
    device: torch.Tensor | None = None


class StepHeader:
    """Headers of all workers in one step, sent when this object is created.

    A header has four rows of numbers, then one row for each microbatch group: first microbatch, sum of losses and
    count, then the sum and count of each metric::

        step            notice                    seconds of computation
        operations      lines of the script       whether a gradient is missing       (comm.desync.recorder)
        groups          checksum of the state: upper 32 bits, lower 32 bits           (step.replicas)
        metrics: a hash     whether the step is audited       values set by the loop: a hash

    If tensors are not on the host, only the device knows the sums of losses, the counts and its part of the checksum.
    These values travel in a separate message from device to device and stay on the device: :meth:`count` returns the
    value that the update needs, and :meth:`read` copies all of them to the host at once. So no worker has to wait for a
    device to check that all workers are at the same step.

    Args:
        starts: first microbatch of each group that this worker has computed.
        pairs: float64 tensor for each of these groups: [sum, count, then sum and count of each metric].
        seconds: seconds that this worker has spent computing.
        missing: whether a microbatch group of this worker gave no gradient to a parameter. Defaults to True (unknown).
        digest: checksum of this worker's state. Workers with the same state have the same checksum.

    Attributes:
        notice: highest notice of any worker: the membership is about to change, or a worker leaves. Known after
            :meth:`check`, as are the next six.
        apart: two ranks whose loops have set different values; empty if there are none.
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
        self._step, self._headers = step, headers
        self._own = headers.own, pairs
        self._world = world = headers.world
        digest = digest or StateDigest()
        recorder = world.recorder
        made = recorder.barrier("session.step", f"step {step}") if recorder else (0.0, 0.0)
        state = len(pairs), *divmod(digest.host, 1 << 32)
        rows = (
            (step, world.notice(), seconds),
            (*made, missing),
            state,
            (_hash(headers.own or ()), headers.audited, _hash(headers.set_by_loop)),
        )
        # same size in all steps: workers at different steps must be able to exchange headers and report it
        own = torch.zeros((_ROWS + headers.groups, _COLUMNS + 2 * len(headers.metrics)), dtype=torch.float64)
        assert len(starts) == len(pairs) <= headers.groups, f"{len(starts)} groups, room for {headers.groups}"
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
        self._losses: list[GroupLoss] | None = None
        self._hashes: list[float] = []
        # highest notice of any worker: the membership is about to change, or a worker leaves. Known after
        # :meth:`check`, as are the next four.
        self.notice = 0
        self.seconds: list[float] = []
        self.missing = True
        self.starts: list[list[int]] = []
        self.audited = False
        self.apart: tuple[int, ...] = ()
        self.set_by_loop: list[float] = []

    def check(self) -> None:
        """Wait for the headers of all workers, and check that all workers are at the same step and made the same calls.

        Raises:
            DisagreementError: workers are at different steps, or have called different operations of
                ``torch.distributed``. The message names the ranks and their steps or calls.
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
        self.set_by_loop = [header[3][2] for header in headers]
        self.apart = next(((0, rank) for rank, one in enumerate(self.set_by_loop) if one != self.set_by_loop[0]), ())
        if self._world.recorder is not None:
            self._world.recorder.check_agreement([(header[1][0], header[1][1]) for header in headers])

    @property
    def on_device(self) -> bool:
        """Whether losses and counts stay on the workers' devices until :meth:`read`."""
        return self._on_device is not None

    def count(self) -> torch.Tensor | float:
        """Return the divisor of the gradients' sum over all workers, as a scalar tensor if only the device knows it."""
        if self._on_device is not None:
            self.check()
            with self._world.awaiting("in the exchange of losses"):
                return self._on_device.wait()[:, 1:, 1].sum()
        return math.fsum(group.counted for group in self.losses())

    def read(self, norm: torch.Tensor | None = None) -> None:
        """Start copying the values that the devices have exchanged to the host. A step needs no other copy.

        Args:
            norm: scalar to copy along with them. :meth:`norm` returns it.
        """
        if self._on_device is not None and self._copy is None:
            self.check()
            with self._world.awaiting("in the exchange of losses"):
                values = self._on_device.wait().flatten()
            self._copy = HostCopy(values if norm is None else torch.cat((values, norm.double().reshape(1))))

    def norm(self) -> float:
        """Wait for the copy, and return the norm that was passed to :meth:`read`."""
        assert self._copy is not None
        return float(self._copy.wait()[-1])

    def losses(self) -> list[GroupLoss]:
        """Return the losses of all workers' microbatch groups in the order of microbatches."""
        if self._losses is None:
            self.check()
            self._losses = sorted(
                GroupLoss(start, rank, loss, count)
                for rank, (starts, pairs) in enumerate(zip(self.starts, self._pairs(), strict=True))
                for start, (loss, count, *_) in zip(starts, pairs, strict=False)
            )
        return self._losses

    def metrics(self) -> dict[int, tuple[float, ...]]:
        """Return the metrics of all groups by first microbatch. All workers must call this before the next step.

        Raises:
            InputError: workers have metrics of different names. The message lists the names of two workers.
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
        """Return for each worker the sum, count and metrics of each of its groups, followed by unused rows."""
        assert self._tables is not None
        if self._on_device is None:
            return [[row[1:] for row in table[_ROWS:]] for table in self._tables]
        return [table[1:] for table in self._device_tables()]

    def _device_tables(self) -> list[list[list[float]]]:
        """Return the table that each worker's device has sent."""
        self.read()
        assert self._copy is not None and self._on_device is not None
        shape = self._on_device.wait().shape
        tables: list[list[list[float]]] = self._copy.wait()[: shape.numel()].view(shape).tolist()
        return tables

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the metrics. Valid after :meth:`metrics`."""
        return self._headers.metrics

    def state_digests(self) -> list[int]:
        """Return the 64-bit checksum of each worker's state."""
        self.check()
        assert self._tables is not None
        sums = [_joined(*table[2][1:3]) for table in self._tables]
        if self._on_device is not None:
            sums = [host + _joined(*table[0][:2]) for host, table in zip(sums, self._device_tables(), strict=True)]
        return [one % (1 << 64) for one in sums]


def _start_on_device(headers: Headers, pairs: list[torch.Tensor], digest: torch.Tensor | None) -> PendingGather:
    """Send the values that only the device knows: two halves of its checksum, then a row for each group."""
    world, columns = headers.world, 2 + 2 * len(headers.metrics)
    own = torch.zeros((1 + headers.groups, columns), dtype=torch.float64, device=world.device)
    if digest is not None:
        own[0, :2] = torch.stack((digest >> 32, digest)) & _LOWER
    if pairs:
        table = torch.stack(pairs)
        own[1 : 1 + len(pairs), : table.shape[1]] = table
    return AllGather(world, LOSSES_TAG, 8 * own.numel()).start(own)


def _hash(names: tuple[str, ...]) -> float:
    """Return a whole number below 2**48 that identifies the names, or 0 without names."""
    if not names:
        return 0.0
    digest = hashlib.blake2b(repr(names).encode(), digest_size=6).digest()
    return float(int.from_bytes(digest, "little"))


def agreed_names(known: list[tuple[int, tuple[str, ...]]]) -> tuple[str, ...]:
    """Return the metric names, which must be the same on all given ranks."""
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
