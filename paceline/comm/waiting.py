"""Waits of a worker for other workers: the awaited ranks, the purpose, and the checks that end a wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from paceline.comm.rendezvous.coordinator_client import CoordinatorClient
from paceline.coordinator.types import Member
from paceline.errors import PacelineError, WorkerLost, WorkerSilent, name_ranks


class Awaited(NamedTuple):
    """Ranks that a worker waits for, and the start of the wait on ``Waiting.clock``."""

    ranks: tuple[int, ...] = ()
    since: float = 0.0


class Recorder(Protocol):
    """Methods of the recorder of the script's own collectives (``comm.desync.recorder``) that waits call."""

    def look(self) -> None:
        """Raise if another worker is known to have made a different call."""
        ...

    def explain(self, lost: PacelineError) -> PacelineError:
        """Return the DisagreementError to raise instead if the workers made different calls, otherwise ``lost``."""
        ...


class Waiting:
    """This worker, as it waits for the others, which may change if the run has a coordinator.

    Attributes:
        rank: rank of this worker, from 0.
        size: number of workers.
        timeout: timeout in seconds of a wait for another worker.
        awaited: ranks that this worker is waiting for.
        recorder: recorder of the script's own collectives. None in a single process.
        clock: function that returns the time in seconds, by which waits are measured.
    """

    recorder: Recorder | None = None
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, rank: int, size: int, timeout: float, coordinator: CoordinatorClient | None = None) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.coordinator = coordinator
        self.awaited = Awaited()
        self._members: tuple[Member, ...] = ()
        self._purpose = ""

    @property
    def others(self) -> list[int]:
        """Ranks of all other workers."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def alarmed(self) -> bool:
        """Whether a worker has been lost since the current membership formed."""
        return self.coordinator is not None and self.coordinator.alarmed

    def check(self) -> None:
        """Raise WorkerLost early if a worker has already been lost.

        Raises:
            WorkerLost: a worker has been lost since the current membership formed.
        """
        if self.alarmed:
            raise WorkerLost(f"Rank {self.rank}: another worker was lost.")

    def check_silence(self, ranks: Sequence[int], waited: float) -> None:
        """Raise WorkerSilent if a wait has exceeded the timeout.

        Args:
            ranks: ranks that this worker waits for. If empty, the error names all other ranks.
            waited: duration of the wait in seconds.

        Raises:
            WorkerSilent: the ranks have sent nothing for the timeout.
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
        if self.coordinator is None or not self.coordinator.alarmed:
            return False
        return self.coordinator.broken or self._members[rank].worker in self.coordinator.missing

    def waits_for(self, ranks: Sequence[int]) -> None:
        """Record the ranks that this worker waits for, or an empty sequence when the wait has ended."""
        if tuple(ranks) != self.awaited.ranks:
            self.awaited = Awaited(tuple(ranks), self.clock())

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
        before, self._purpose = self._purpose, purpose
        try:
            yield
        finally:
            self._purpose = before

    @property
    def purpose(self) -> str:
        """Purpose of the current waits, as given to :meth:`awaiting`. Empty outside of :meth:`awaiting`."""
        return self._purpose

    def doing(self) -> str:
        """Return a description of what this worker does while it waits."""
        if not self._purpose or self._purpose.startswith("to "):
            return f"waiting for others {self._purpose}".rstrip()
        return self._purpose

    def explain(self, lost: WorkerLost) -> PacelineError:
        """Return the DisagreementError to raise instead if the workers made different calls, otherwise ``lost``."""
        return self.recorder.explain(lost) if self.recorder else lost
