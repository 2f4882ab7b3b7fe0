"""Waits of a worker for other workers: for which, for what, and how a wait ends when one of them is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.comm.rendezvous.env_init import reason_of
from paceline.comm.transport.base import Work
from paceline.coordinator.types import Membership
from paceline.errors import PacelineError, WorkerLost, WorkerSilent, name_ranks

_MOST_LINKS = 3  # maximum number of links in the record of a step


class Awaited(NamedTuple):
    """Ranks that a worker waits for, and the start of the wait on ``Waiting.clock``."""

    ranks: tuple[int, ...] = ()
    since: float = 0.0


class Waits(NamedTuple):
    """Waits of a worker since they were last taken."""

    seconds: float
    between: float  # seconds of them between two steps
    late: int | None  # rank that this worker has waited for longest
    links: list[tuple[int, float]]  # ranks whose messages have taken longest to arrive, and seconds


class Recorder(Protocol):
    """Methods of the recorder of the script's own collectives (``comm.desync.recorder``) that waits call."""

    def check(self) -> None:
        """Raise if another worker is known to have made a different call."""

    def explain(self, lost: PacelineError) -> PacelineError:
        """Return the DisagreementError to raise instead if the workers made different calls, otherwise ``lost``."""


class Waiting:
    """Waits of this worker for the others of its membership."""

    recorder: Recorder | None = None  # recorder of the script's own collectives. None in a single process.
    # function that records each wait and transfer as an event. None if they are not recorded.
    mark: Callable[..., None] | None = None
    # function that returns the time in seconds, by which waits are measured
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, membership: Membership, timeout: float, coordinator: CoordinatorClient | None = None) -> None:
        self.membership = membership
        self.timeout = timeout  # timeout in seconds of a wait for another worker
        self.coordinator = coordinator
        self.awaited = Awaited()  # ranks that this worker is waiting for
        # whether this worker waits in a call of the process group, which an alarm must interrupt
        self.in_process_group = False
        self.purpose = ""  # of the current waits, as given to :meth:`awaiting`. Empty outside of it.
        self._counted = 0.0  # time up to which waits are in the two sums below
        self._waited = self._waited_between = 0.0
        self._waited_for: dict[int, float] = {}
        self._receiving = False
        self._received_from: dict[int, float] = {}  # waits for links

    @property
    def rank(self) -> int:
        return self.membership.rank

    @property
    def size(self) -> int:
        return self.membership.size

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def alarmed(self) -> bool:
        """Whether a worker has been lost since the current membership formed."""
        return self.coordinator is not None and self.coordinator.alarm > self.coordinator.generation

    def check(self) -> None:
        """Raise WorkerLost early if a worker has already been lost."""
        if self.alarmed:
            raise WorkerLost(f"Rank {self.rank}: another worker was lost.")

    def check_silence(self, ranks: Sequence[int], waited: float) -> None:
        """Raise WorkerSilent if a wait has exceeded the timeout.

        Args:
            ranks: ranks that this worker waits for. If empty, the error names all other ranks.
        """
        if waited <= self.timeout:
            return
        ranks = ranks or self.others
        named, are = name_ranks(ranks), "it is" if len(ranks) == 1 else "they are"
        purpose = f" {self.purpose}" if self.purpose else ""
        silent = WorkerSilent(
            f"Rank {self.rank} waited {waited:.0f} s for {named}{purpose} (timeout_seconds). "
            f"See the output of {named}: {are} stopped, or busy with something else."
        )
        raise self.explain(silent)

    def is_missing(self, rank: int) -> bool:
        """Return whether a worker will be missing from the next membership, or the coordinator is lost."""
        if self.coordinator is None or not self.alarmed:
            return False
        return self.coordinator.broken or self.membership.workers[rank] in self.coordinator.missing

    def waits_for(self, ranks: Sequence[int], since: float | None = None) -> None:
        """Record the ranks that this worker waits for, or an empty sequence when the wait has ended.

        Args:
            since: time of ``clock`` at which the wait began. Defaults to the current time.
        """
        before, left = self.awaited, tuple(ranks)
        if left == before.ranks:
            return
        now = self.clock() if since is None else max(since, self._counted)
        if before.ranks:
            self._waited += now - self._counted
            if self.mark is not None:
                self.mark("wait", ranks=before.ranks, what=self.purpose, seconds=now - self._counted)
            for rank in before.ranks:
                self._waited_for[rank] = self._waited_for.get(rank, 0.0) + now - self._counted
                if self._receiving:
                    self.add_received(rank, now - self._counted)
        self._counted = now
        self.awaited = Awaited(left, before.since if left and set(left) <= set(before.ranks) else now)

    def add_wait(self, seconds: float) -> None:
        """Count a wait for the other workers in a call of ``torch.distributed`` that the script made."""
        self._waited += seconds

    def add_received(self, rank: int, seconds: float) -> None:
        """Count the time for which a message has arrived from this rank, which had begun to send it, for its link."""
        self._received_from[rank] = self._received_from.get(rank, 0.0) + seconds

    def begin_step(self) -> None:
        """Count the waits since the last :meth:`take_waits` as waits between two steps."""
        self._waited_between = self._waited

    def take_waits(self) -> Waits:
        """Return the waits since the last call."""
        late = max(self._waited_for, key=self._waited_for.__getitem__, default=None)
        links = sorted(self._received_from.items(), key=lambda one: -one[1])[:_MOST_LINKS]
        waits = Waits(self._waited, self._waited_between, late, links)
        self._waited = self._waited_between = 0.0
        self._waited_for, self._received_from = {}, {}
        return waits

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Count the waits inside this context as waits for links.

        The awaited messages must depend on nothing that their senders receive. Otherwise every worker would wait for
        a slow link, and none could tell which link it is.
        """
        self._receiving = True
        try:
            yield
        finally:
            self._receiving = False

    @contextmanager
    def waiting_for(self, ranks: Sequence[int]) -> Iterator[None]:
        """Record a wait for these ranks, if the main thread calls this outside of any other recorded wait."""
        tells = not self.awaited.ranks and threading.current_thread() is threading.main_thread()
        if tells:
            self.waits_for(ranks)
        try:
            yield
        finally:
            if tells:
                self.waits_for(())

    @contextmanager
    def awaiting(self, purpose: str) -> Iterator[None]:
        """Set the purpose of the waits inside this context.

        Args:
            purpose: completes "rank 0 has waited 30 s for rank 1 ...", such as ``"to send the output of stage 0"`` or
                ``"in the all-reduce of bucket 2"``.
        """
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    def doing(self) -> str:
        """Return a description of what this worker does while it waits."""
        if not self.purpose or self.purpose.startswith("to "):
            return f"waiting for others {self.purpose}".rstrip()
        return self.purpose

    def explain(self, lost: WorkerLost) -> PacelineError:
        """Return the DisagreementError to raise instead if the workers made different calls, otherwise ``lost``."""
        return self.recorder.explain(lost) if self.recorder else lost

    @contextmanager
    def waiting_in_group(self, ranks: Sequence[int], suspects: list[int], where: str) -> Iterator[None]:
        """Record a wait for these ranks in a call of the process group, which the loss of a worker interrupts."""
        self.waits_for(ranks)
        self.in_process_group = True
        try:
            self.check()  # an earlier alarm does not interrupt the call
            yield
        except RuntimeError as error:
            raise self.lost(suspects, where, error) from error
        finally:
            self.in_process_group = False
        self.waits_for(())

    def lost(self, peers: list[int], where: str, error: RuntimeError) -> PacelineError:
        """Return the error for a failed call, naming the peers and, unless they timed out, all broken connections."""
        reason, where = reason_of(error), f" {where}" if where else ""
        if self.alarmed:  # the launcher names the lost worker
            return WorkerLost(f"Rank {self.rank}: another worker was lost{where}. [{reason}]")
        silent = peers and "imed out" in reason
        gone = peers if silent else sorted({*peers, *self.broken_connections()})
        named = name_ranks(gone) if gone else "another worker"
        what = f"{named} sent nothing for {self.timeout:.0f} s (timeout_seconds)" if silent else f"lost {named}"
        kind = WorkerSilent if silent else WorkerLost
        lost = kind(f"Rank {self.rank}: {what}{where}. See the output of {named} for the cause. [{reason}]")
        return self.explain(lost)

    def broken_connections(self) -> list[int]:
        """Return the ranks to which the connection is broken, as far as that can be known without waiting."""
        return []


class Transfer:
    """Send or receive in progress, or a collective of all workers if no peers are named."""

    __slots__ = ("_peers", "_waiting", "_where", "_work")

    def __init__(self, waiting: Waiting, work: Work, peers: list[int], where: str) -> None:
        self._waiting, self._work, self._peers, self._where = waiting, work, peers, where

    def wait(self) -> None:
        """Wait until the transfer is done. See :attr:`Capabilities.blocking_wait`."""
        with self._waiting.waiting_in_group(self._peers or self._waiting.others, self._peers, self._where):
            self._work.wait()


class RecordedTransfer(Transfer):
    """Transfer that is recorded as an event when it is done."""

    __slots__ = ("_about", "_begin", "_mark")

    def __init__(self, waiting: Waiting, work: Work, peers: list[int], where: str, way: str, size: int) -> None:
        super().__init__(waiting, work, peers, where)
        self._begin = time.perf_counter()
        self._about = {"way": way, "ranks": peers, "bytes": size, "what": where}
        assert waiting.mark is not None
        self._mark = waiting.mark

    def wait(self) -> None:
        super().wait()
        self._mark("transfer", **self._about, seconds=time.perf_counter() - self._begin)
