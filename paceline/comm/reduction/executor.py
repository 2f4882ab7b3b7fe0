"""Means over all workers in one canonical order, overlapped with the backward pass.

A reduction has three parts::

    plan        buckets (``reduction.buckets``), and the nodes of the canonical tree on each rank (``schedule.tree``)
    exchange    messages between the workers that collect the parts of a bucket (``reduction.exchange``)
    executor    this file: the phase of each bucket, the transfers and the sums

Each worker adds up its chunks of a bucket along the tree, so the bits do not depend on which worker computed a part. A
bucket is sent as soon as its tensors are written. A worker sends its parts of the next bucket before it waits::

    bucket 0    scatter ─────── reduce ──────────────────────── means
    bucket 1            scatter ─────────────── reduce ──────────────── means
    bucket 2                            scatter ─────── reduce ──────────────── means
                └─────────── backward pass ────────────┘└───────── finish ──────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from time import perf_counter

import torch

from paceline.comm.collectives.subgroup import Subgroup
from paceline.comm.reduction.buckets import Bucket, pack
from paceline.comm.reduction.division import Divisor, divide
from paceline.comm.reduction.exchange import Exchange, Messages, OwnerExchange, Phase, widened
from paceline.comm.reduction.narrow import add_
from paceline.comm.transport.base import Message
from paceline.comm.waiting import Transfer
from paceline.comm.world import World
from paceline.events import EventLog
from paceline.schedule.tree import Node, total
from paceline.system import fault_points


class Reduction:
    """Average of tensors over all workers, computed again in each step.

    Args:
        world: all workers or a subgroup.
        exchange: exchange that moves bytes between the workers.
        tensors: examples of the summed tensors (shapes, types, strides), in the order in which they become ready.
        events: log that records each bucket.
        name: name of the summed tensors in the records.
        bucket_bytes: number of bytes at which a bucket is full. Defaults to that of the exchange's layout.
        widen: whether sums in half precision are added in float32, with a rounded result.

    Attributes:
        divisor: divisor of the sums of the current step. None while it is unknown.
        needs_divisor: whether the step is held up until :meth:`divide_by`, because the next phase of a bucket needs the
            divisor, or must not wait for others before all workers are known to be in the same step.
    """

    def __init__(
        self,
        world: World | Subgroup,
        exchange: Exchange,
        tensors: list[torch.Tensor],
        events: EventLog,
        name: str,
        bucket_bytes: int | None = None,
        widen: bool = False,
    ) -> None:
        self._world, self._exchange = world, exchange
        self._events, self._name, self._widen = events, name, widen
        self.kind, self.members = exchange.kind, len(tensors)
        self.divisor: Divisor | None = None
        self.needs_divisor = False
        self._bucket_bytes = bucket_bytes or exchange.layout.bucket_bytes
        self._buckets = pack(tensors, exchange.layout, self._bucket_bytes)
        exchange.open(self._buckets)
        self._at = {member: (bucket, at) for bucket in self._buckets for at, member in enumerate(bucket.members)}
        self._sums = len(exchange.before)
        self._owner = exchange if isinstance(exchange, OwnerExchange) else None
        self._own_up_to = self._last(lambda bucket: bucket.home == world.rank)
        self._spread_up_to = self._last(lambda bucket: not exchange.layout.eager or self._receives(bucket))
        self._begun = 0  # number of steps
        self._phases: tuple[Phase | None, ...] = (*exchange.before, None, *exchange.after)
        """None stands for :meth:`_reduce`. A bound method would be a reference cycle and delay freeing memory."""

    @property
    def bucket_members(self) -> list[list[int]]:
        return [bucket.members for bucket in self._buckets]

    def _last(self, holds: Callable[[Bucket], bool]) -> list[int]:
        """Return, for each bucket, the index of the last bucket up to it for which a condition holds, or -1.

        The last item is for the bucket before the first, whose index is -1.
        """
        return [*accumulate((bucket.index if holds(bucket) else -1 for bucket in self._buckets), max), -1]

    def _receives(self, bucket: Bucket) -> bool:
        return self._owner is not None and self._owner.spreads_here(bucket)

    def describe(self) -> dict[str, str | int]:
        """Return the kind of the exchange, and the number and size of the buckets, for the records."""
        return {"kind": self.kind, "buckets": len(self._buckets), "bucket_bytes": self._bucket_bytes}

    def begin(self, nodes: list[list[Node]], divisor: Divisor | None = None, held: bool = False) -> None:
        """Start a step.

        Args:
            nodes: for each rank, the nodes whose sums it holds, from left to right.
            divisor: divisor of the sums. If it is not yet known, buckets are sent but nothing waits for others:
                :meth:`divide_by` gives it as soon as ``needs_divisor`` is set.
            held: whether full buckets are only sent, so that nothing waits for others before :meth:`go_on`.
        """
        self._own, self._held = len(nodes[self._world.rank]), held
        self.divisor, self.needs_divisor = divisor, False
        self._begun += 1
        self._done = [0] * len(self._phases)
        """Number of buckets that have started each phase."""
        self._expected = 0  # number of buckets whose parts can arrive
        self._exchange.begin(nodes)
        for bucket in self._buckets:
            bucket.waiting, bucket.sent = len(bucket.members), 0

    def close(self) -> None:
        """Release the examples. No step can start afterwards."""
        for bucket in self._buckets:
            bucket.examples.clear()

    def has_room(self, member: int) -> bool:
        """Return whether :meth:`slots_of` needs no other tensor of this worker first."""
        return self._at[member][0].after < self._done[0]

    def must_wait(self, member: int) -> bool:
        """Return whether the slots of a tensor still hold sums of an earlier bucket, which need the divisor."""
        return self._at[member][0].after >= self._done[-1]

    def slots(self, member: int) -> list[torch.Tensor]:
        """Return the views to write the sums of a tensor into, one for each node of this worker."""
        return [view for (view,) in self.slots_of([member])]

    def slots_of(self, members: Sequence[int]) -> list[list[torch.Tensor]]:
        """Return the views to write the sums of some tensors into: a list for each node of this worker.

        If they hold sums of an earlier bucket, wait for its means.
        """
        found = [self._at[member] for member in members]
        after = max(bucket.after for bucket, _ in found)
        for phase in range(1, len(self._phases)):
            while self._done[phase] <= after:
                self._advance(phase)
        return [[bucket.views[node][at] for bucket, at in found] for node in range(self._own)]

    def written(self, *members: int) -> None:
        """Mark the slots of tensors as filled.

        A bucket is sent when all its tensors are written and all buckets before it have been sent.

        Raises:
            WorkerLost: a worker has been lost since this generation formed.
        """
        self._world.check()
        for member in members:
            self._at[member][0].waiting -= 1
        self._send_full()

    def divide_by(self, divisor: Divisor) -> None:
        """Set the divisor of this step's sums, and continue with the buckets that needed it."""
        self.divisor = divisor
        if self.needs_divisor:
            self.needs_divisor = False
            self._advance_others()
            self._send_full()

    def go_on(self) -> None:
        """Add up all buckets that have been held, and start to distribute their means."""
        for phase in range(1, self._sums + 1):
            while self._done[phase] < len(self._buckets):
                self._advance(phase)

    def finish(self, arrived: Callable[[list[torch.Tensor]], None] | None = None) -> None:
        """Wait until :meth:`mean` can return the means.

        Args:
            arrived: called with the means of each bucket, while later buckets are still in progress.

        Raises:
            WorkerLost: another worker was lost, or sent nothing before the timeout.
        """
        while self._done[-2] < len(self._buckets):
            self._advance_others()
        while self._done[-1] < len(self._buckets):
            self._advance(len(self._phases) - 1)
            if arrived is not None:
                arrived(self._buckets[self._done[-1] - 1].mean_views)

    def mean(self, member: int) -> torch.Tensor:
        """Return the mean of a tensor over all workers, after :meth:`finish`. The next step overwrites it."""
        bucket, at = self._at[member]
        return bucket.mean_views[at]

    def means(self) -> list[torch.Tensor]:
        found = [self._at[member] for member in range(self.members)]
        return [bucket.mean_views[at] for bucket, at in found]

    def spread(self, arrived: Callable[[int, torch.Tensor], None]) -> None:
        """Give all workers the tensors that their servers have written into :meth:`mean`, after :meth:`finish`.

        Args:
            arrived: called with the index and the new value of each tensor that another worker has spread.

        Raises:
            WorkerLost: another worker was lost, or sent nothing before the timeout.
        """
        begin, exchange, eager = perf_counter(), self._owner, self._exchange.layout.eager
        assert exchange is not None
        done, unsent = 0, list[tuple[Bucket, list[Message]]]()  # receives are posted first, see _expect
        with self._world.awaiting(f"for the {self._name} of the others"):
            for bucket in self._buckets:
                last = self._spread_up_to[bucket.after]  # what a worker spreads itself is not in the memory of arrivals
                if unsent and (not eager or last >= done):
                    self._start_unsent(unsent)
                self._await_spread(exchange, self._buckets[done : last + 1], arrived)
                done, bucket.sent = max(done, last + 1), 0
                for sends, receives in exchange.spread(bucket) or ():
                    self._start(bucket, [], receives)
                    unsent.append((bucket, sends))
            self._start_unsent(unsent)
            self._await_spread(exchange, self._buckets[done:], arrived)
        sent = sum(bucket.sent for bucket in self._buckets)
        self._events.mark("spread", what=self._name, bytes=sent, seconds=perf_counter() - begin)

    def _start_unsent(self, unsent: list[tuple[Bucket, list[Message]]]) -> None:
        for bucket, sends in unsent:
            self._start(bucket, sends, [])
        unsent.clear()

    def _await_spread(
        self, exchange: OwnerExchange, buckets: Sequence[Bucket], arrived: Callable[[int, torch.Tensor], None]
    ) -> None:
        for bucket in buckets:
            _wait(bucket.receives)
            _wait(bucket.sends)
            exchange.await_spread(bucket)
            if exchange.spreads_here(bucket):
                for member, value in zip(bucket.members, bucket.mean_views, strict=True):
                    arrived(member, value)

    def _send_full(self) -> None:
        """Send the buckets whose tensors are all written, in order."""
        while not self.needs_divisor and self._done[0] < len(self._buckets):
            bucket = self._buckets[self._done[0]]
            if bucket.waiting:
                return
            bucket.started = perf_counter()
            self._expect()
            self._advance(0)
            if not self._held:
                self._advance_others()

    def _expect(self) -> None:
        """Post the receives of all buckets that have memory, if ``layout.eager``, before this worker sends.

        A sender of gloo waits until it hears of the receive, behind all that the receiver is sending to it. If servers
        posted a receive with its bucket, a link would often carry bytes in one direction only.
        """
        if self._owner is None or not self._exchange.layout.eager:
            return
        for bucket in self._buckets[self._expected :]:
            if self._own_up_to[bucket.after] >= self._done[-1]:  # others have no parts in the memory of this worker
                return
            self._start(bucket, [], self._owner.expect(bucket))
            self._expected += 1

    def _advance_others(self) -> None:
        """Advance a bucket in each phase between the first and the last, except buckets that have just advanced.

        So a bucket waits for work that the other workers have had time to do. With ``layout.eager`` nothing waits
        before all buckets have been sent.
        """
        sent = self._done[0]
        if sent < len(self._buckets):
            sent = 0 if self._exchange.layout.eager else sent - 1
        left = [sent, *self._done[1:]]
        behind = [phase for phase in range(1, len(self._phases) - 1) if self._done[phase] < left[phase - 1]]
        if behind and self.divisor is None:
            self.needs_divisor = True
            return
        for phase in behind:
            self._advance(phase)

    def _advance(self, phase: int) -> None:
        """Run a phase for the next bucket."""
        bucket = self._buckets[self._done[phase]]
        self._done[phase] += 1
        with self._world.awaiting(f"in the all-reduce of bucket {bucket.index} of the {self._name}"):
            if phase > self._sums:
                _wait(bucket.receives)
                _wait(bucket.sends)
            for sends, receives in (self._phases[phase] or self._reduce)(bucket) or ():
                self._start(bucket, sends, receives)
        if phase == len(self._phases) - 1:
            seconds = perf_counter() - bucket.started
            self._events.mark("exchange", what=self._name, bucket=bucket.index, bytes=bucket.sent, seconds=seconds)

    def _reduce(self, bucket: Bucket) -> Iterable[Messages] | None:
        """Add up this worker's chunks along the tree, divide, and distribute the means."""
        if self._name == "gradients" and bucket is self._buckets[-1]:
            fault_points.reach("inside the collective")
        assert self.divisor is not None
        if receives := bucket.receives:  # each comes first in turn, so a slow link to this worker delays them alike
            turn = (bucket.index + self._begun) % len(receives)
            receives[:] = receives[turn:] + receives[:turn]
        with self._world.receiving():
            _wait(bucket.receives)
        for mean, parts in self._exchange.collect(bucket):
            held = widened(parts) if self._widen else parts
            divide(total(held, add_), self.divisor, out=mean)
        return self._exchange.deliver(bucket)

    def _start(self, bucket: Bucket, sends: list[Message], receives: list[Message]) -> None:
        """Start the transfers of non-empty tensors. A chunk may be empty if its share of a small bucket is small."""
        sends, receives = ([one for one in many if one.tensor.numel()] for many in (sends, receives))
        transfers = self._world.start_transfers(sends, receives)
        bucket.receives += transfers[: len(receives)]
        bucket.sends += transfers[len(receives) :]
        bucket.sent += sum(one.tensor.nbytes for one in sends)


def _wait(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
    transfers.clear()
