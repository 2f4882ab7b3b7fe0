"""Which microbatches each worker computes with backup workers, who are not waited for: whole numbers, no clock.

::

    batches of 4 microbatches; 2 workers are waited for, 1 is not        ▓ in time   ░ too late

    step 0    ▓ 0 1   ░ 2 3   ▓ 4 5          one share more than the batch has, taken from the next batch
    step 1    ▓ 2 3   ▓ 6 7   ░ 8 9          late microbatches come back first
    step 2    ▓ 8 9   ▓ 10 11   (8 9)        the last step of the epoch: all that is left, and copies of it

Microbatches are numbered from 0 through the whole epoch. After each step about as many have been used as with one batch
per step; after the last step of the epoch, each has been used exactly once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from paceline.schedule.shares import even


@dataclass(frozen=True)
class EpochLength:
    """The length of an epoch: steps, microbatches of a full batch, microbatches of the epoch."""

    steps: int
    batch: int
    total: int


@dataclass(frozen=True)
class EpochProgress:
    """The progress in an epoch.

    Attributes:
        steps: steps done.
        before: all microbatches before this one have been used,
        beyond: and these.
    """

    steps: int = 0
    before: int = 0
    beyond: tuple[int, ...] = ()

    def unused(self, length: EpochLength) -> list[int]:
        """The microbatches not used yet, in order."""
        used = frozenset(self.beyond)
        return [one for one in range(self.before, length.total) if one not in used]

    def target(self, length: EpochLength) -> int:
        """The number of microbatches for the next step."""
        done = self.before + len(self.beyond)
        return min((self.steps + 1) * length.batch, length.total) - done

    def after(self, used: Collection[int]) -> EpochProgress:
        """The progress after a step that used these microbatches.

        >>> EpochProgress().after([0, 1, 4, 5])
        EpochProgress(steps=1, before=2, beyond=(4, 5))
        """
        known = {*self.beyond, *used}
        before = self.before
        while before in known:
            before += 1
        return EpochProgress(self.steps + 1, before, tuple(sorted(one for one in known if one > before)))

    def skipped(self, length: EpochLength) -> EpochProgress:
        """The progress after a step that the script skipped, with its samples."""
        return self.after(self.unused(length)[: self.target(length)])


@dataclass(frozen=True)
class BackupShares:
    """The shares of a step.

    Attributes:
        members: the microbatches of each share.
        needed: the number of different shares that make the update.
    """

    members: tuple[tuple[int, ...], ...]
    needed: int

    @property
    def copied(self) -> bool:
        """Whether all shares are needed; workers without a share then compute a copy of one."""
        return self.needed == len(self.members)

    def of(self, rank: int, step: int, workers: int) -> int | None:
        """The share that a worker begins with, if any.

        Shares rotate: the first ones hold the late microbatches, which must not go to the same slow worker each time.
        """
        index = (rank + step) % workers
        if index < len(self.members):
            return index
        return index % len(self.members) if self.copied else None


def return_late(progress: EpochProgress, length: EpochLength, workers: int, spare: int) -> BackupShares:
    """The shares of a step; late ones come back in a later step.

    The last microbatch of an epoch is kept for its last step, which would be empty otherwise.

    Args:
        progress: in the epoch.
        length: of the epoch.
        workers: the number of workers.
        spare: the number of backup workers.

    >>> return_late(EpochProgress(), EpochLength(steps=3, batch=4, total=12), workers=3, spare=1).members
    ((0, 1), (2, 3), (4, 5))
    """
    target, waited = progress.target(length), workers - spare
    free = progress.unused(length)
    if progress.steps < length.steps - 1:
        free = free[:-1]
    wanted = -(-target * workers // waited)
    if len(free) >= wanted and progress.steps < length.steps - 1:
        return BackupShares(_cut(free[:wanted], workers), waited)
    shares = _cut(free[:target], waited)
    return BackupShares(shares, len(shares))


def drop_late(microbatches: range, workers: int, spare: int) -> BackupShares:
    """The shares of a step whose batch is divided among all workers; late ones are dropped.

    >>> drop_late(range(4, 8), workers=3, spare=1)
    BackupShares(members=((4, 5), (6,), (7,)), needed=2)
    """
    shares = _cut(list(microbatches), workers)
    return BackupShares(shares, min(workers - spare, len(shares)))


def _cut(microbatches: list[int], parts: int) -> tuple[tuple[int, ...], ...]:
    shares = even(len(microbatches), parts)
    return tuple(tuple(microbatches[share.start : share.stop]) for share in shares if share)


def resume_epoch(steps: int, length: EpochLength) -> EpochProgress:
    """The progress of an epoch whose first steps were done without backup workers."""
    return replace(EpochProgress(), steps=steps, before=min(steps * length.batch, length.total))
