"""Shares of microbatches with backup workers, which a step does not wait for. Integers only, no clock.

::

    batches of 4 microbatches; each step waits for 2 of 3 workers        ▓ in time   ░ too late

    step 0    ▓ 0 1   ░ 2 3   ▓ 4 5          one share more than the batch has, taken from the next batch
    step 1    ▓ 2 3   ▓ 6 7   ░ 8 9          late microbatches come back first
    step 2    ▓ 8 9   ▓ 10 11   (8 9)        the last step of the epoch: all remaining microbatches, and copies

Microbatches are numbered from 0 through the whole epoch. After each step about as many microbatches have been used as
with one batch per step. After the last step of the epoch, each has been used exactly once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from paceline.schedule.shares import even


@dataclass(frozen=True)
class EpochLength:
    """Length of an epoch: steps, microbatches of a full batch, microbatches of the epoch."""

    steps: int
    batch: int
    total: int


@dataclass(frozen=True)
class EpochProgress:
    """Progress in an epoch."""

    steps: int = 0  # number of steps done
    before: int = 0  # first unused microbatch
    beyond: tuple[int, ...] = ()  # used microbatches after ``before``

    def unused(self, length: EpochLength) -> list[int]:
        """Return the unused microbatches, in order."""
        used = frozenset(self.beyond)
        return [one for one in range(self.before, length.total) if one not in used]

    def target(self, length: EpochLength) -> int:
        """Return the number of microbatches for the next step."""
        done = self.before + len(self.beyond)
        return min((self.steps + 1) * length.batch, length.total) - done

    def after(self, used: Collection[int]) -> EpochProgress:
        """Return the progress after a step that used these microbatches.

        >>> EpochProgress().after([0, 1, 4, 5])
        EpochProgress(steps=1, before=2, beyond=(4, 5))
        """
        known = {*self.beyond, *used}
        before = self.before
        while before in known:
            before += 1
        return EpochProgress(self.steps + 1, before, tuple(sorted(one for one in known if one > before)))

    def skipped(self, length: EpochLength) -> EpochProgress:
        """Return the progress after a step that the script skipped together with its samples."""
        return self.after(self.unused(length)[: self.target(length)])


@dataclass(frozen=True)
class BackupShares:
    """Shares of a step."""

    members: tuple[tuple[int, ...], ...]  # microbatches of each share
    needed: int  # number of different shares that make the update

    @property
    def copied(self) -> bool:
        """Whether all shares are needed, so that workers without a share compute a copy of a share."""
        return self.needed == len(self.members)

    def of(self, rank: int, step: int, workers: int) -> int | None:
        """Return the index of the share with which a worker begins, or None if it has none.

        Shares rotate, because the first shares hold late microbatches, which must not return to the same slow worker.
        """
        index = (rank + step) % workers
        if index < len(self.members):
            return index
        return index % len(self.members) if self.copied else None


def step_shares(progress: EpochProgress, length: EpochLength, workers: int, spare: int) -> BackupShares:
    """Return the shares of a step whose late microbatches return in a later step.

    The last microbatch of an epoch is reserved for the last step, which could otherwise be empty.

    >>> step_shares(EpochProgress(), EpochLength(steps=3, batch=4, total=12), workers=3, spare=1).members
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


def _cut(microbatches: list[int], parts: int) -> tuple[tuple[int, ...], ...]:
    shares = even(len(microbatches), parts)
    return tuple(tuple(microbatches[share.start : share.stop]) for share in shares if share)


def resume_epoch(steps: int, length: EpochLength) -> EpochProgress:
    """Return the progress of an epoch whose first steps were done without backup workers."""
    return replace(EpochProgress(), steps=steps, before=min(steps * length.batch, length.total))
