"""How a worker waits for others: which ones, for what, and what ends the wait."""

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
    """The ranks that a worker waits for, and since when (``Waiting.clock``)."""

    ranks: tuple[int, ...] = ()
    since: float = 0.0


class Recorder(Protocol):
    """What waits need to know of the script's own collectives (``comm.desync.recorder``)."""

    def look(self) -> None:
        """Raise if another worker is known to have made a different call."""
        ...

    def explain(self, lost: PacelineError) -> PacelineError:
        """Return a better error if the workers made different calls."""
        ...


class Waiting:
    """One worker among others; they may change when there is a coordinator.

    Attributes:
        rank: of this worker, from 0.
        size: how many workers there are.
        timeout: seconds to wait for another worker.
        awaited: whom this worker waits for now.
        recorder: of the script's own collectives; none in one process.
        clock: the seconds in which waits are counted.
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
        """The ranks of all other workers."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def alarmed(self) -> bool:
        """Whether a worker was lost since these workers came together."""
        return self.coordinator is not None and self.coordinator.alarmed

    def check(self) -> None:
        """Do not begin what another worker's loss has made useless.

        Raises:
            WorkerLost: a worker was lost since these came together.
        """
        if self.alarmed:
            raise WorkerLost(f"Rank {self.rank}: another worker was lost.")

    def check_silence(self, ranks: Sequence[int], waited: float) -> None:
        """Do not wait any longer than for the timeout.

        Args:
            ranks: the workers for whom this one waits; none: it is not known for whom.
            waited: seconds.

        Raises:
            WorkerSilent: they stayed silent for the timeout.
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
        """Whether a worker was dropped from the next membership."""
        if self.coordinator is None or not self.coordinator.alarmed:
            return False
        return self.coordinator.broken or self._members[rank].worker in self.coordinator.missing

    def waits_for(self, ranks: Sequence[int]) -> None:
        """Remember whom this worker waits for; nobody when it goes on."""
        if tuple(ranks) != self.awaited.ranks:
            self.awaited = Awaited(tuple(ranks), self.clock())

    @contextmanager
    def waiting_for(self, ranks: Sequence[int]) -> Iterator[None]:
        """Wait for these workers, unless the main thread does so for others already, of whose wait this is a part."""
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
        """Say what waits are for meanwhile.

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
        """What this worker waits for, as given to :meth:`awaiting`; empty if nothing was said."""
        return self._purpose

    def doing(self) -> str:
        """What this worker does while it waits, in words."""
        if not self._purpose or self._purpose.startswith("to "):
            return f"waiting for others {self._purpose}".rstrip()
        return self._purpose

    def explain(self, lost: WorkerLost) -> PacelineError:
        """Return a better error if workers were lost because they made different calls."""
        return self.recorder.explain(lost) if self.recorder else lost
