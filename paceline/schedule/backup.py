"""Which microbatches the workers of a step compute when the last of them are not waited for: whole numbers, no clock.

::

    batches of 4 microbatches; 2 workers are waited for, 1 is not        ▓ in time   ░ too late

    step 0    ▓ 0 1   ░ 2 3   ▓ 4 5          one group more than the batch has, taken from the next batch
    step 1    ▓ 2 3   ▓ 6 7   ░ 8 9          what was too late comes back first
    step 2    ▓ 8 9   ▓ 10 11   (8 9)        the last step of the epoch: all that is left, and copies of it

The microbatches of an epoch are numbered through, from 0. After each step but the last one of an epoch about as many
have been used as with one batch for each step, and after the last one each of them exactly once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from paceline.schedule.shares import even


@dataclass(frozen=True)
class EpochLength:
    """How long an epoch is: its steps, the microbatches of a full batch, and those of the whole epoch."""

    steps: int
    batch: int
    total: int


@dataclass(frozen=True)
class EpochProgress:
    """How far an epoch is.

    Attributes:
        steps: steps done.
        before: all microbatches before this one have been used,
        beyond: and these.
    """

    steps: int = 0
    before: int = 0
    beyond: tuple[int, ...] = ()

    def unused(self, length: EpochLength) -> list[int]:
        """What has not been used yet, in order."""
        used = frozenset(self.beyond)
        return [one for one in range(self.before, length.total) if one not in used]

    def target(self, length: EpochLength) -> int:
        """How many microbatches the next step should use."""
        done = self.before + len(self.beyond)
        return min((self.steps + 1) * length.batch, length.total) - done

    def after(self, used: Collection[int]) -> EpochProgress:
        """One step later.

        >>> EpochProgress().after([0, 1, 4, 5])
        EpochProgress(steps=1, before=2, beyond=(4, 5))
        """
        known = {*self.beyond, *used}
        before = self.before
        while before in known:
            before += 1
        return EpochProgress(self.steps + 1, before, tuple(sorted(one for one in known if one > before)))

    def skipped(self, length: EpochLength) -> EpochProgress:
        """One step later, which the script has left out together with its samples."""
        return self.after(self.unused(length)[: self.target(length)])


@dataclass(frozen=True)
class BackupShares:
    """What the workers compute in a step.

    Attributes:
        members: the microbatches of each group.
        needed: so many different groups make the update.
    """

    members: tuple[tuple[int, ...], ...]
    needed: int

    @property
    def copied(self) -> bool:
        """Whether all groups are needed; who has nothing of its own to compute then computes one of them, too."""
        return self.needed == len(self.members)

    def of(self, rank: int, step: int, workers: int) -> int | None:
        """The group with which a worker begins; none if there is none for it.

        Groups go round: the first ones hold what was too late before, and must not go to a slow worker for ever.
        """
        place = (rank + step) % workers
        if place < len(self.members):
            return place
        return place % len(self.members) if self.copied else None


def return_late(progress: EpochProgress, length: EpochLength, workers: int, spare: int) -> BackupShares:
    """The groups of a step; what is too late comes back in a later one.

    The last microbatch of an epoch is left to its last step, which would have nothing to do otherwise.

    Args:
        progress: how far the epoch is.
        length: of the epoch.
        workers: how many there are.
        spare: how many of them are not waited for.

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
    groups = _cut(free[:target], waited)
    return BackupShares(groups, len(groups))


def drop_late(microbatches: range, workers: int, spare: int) -> BackupShares:
    """The groups of a step whose batch is cut for all workers; what is too late is not used in this epoch.

    >>> drop_late(range(4, 8), workers=3, spare=1)
    BackupShares(members=((4, 5), (6,), (7,)), needed=2)
    """
    groups = _cut(list(microbatches), workers)
    return BackupShares(groups, min(workers - spare, len(groups)))


def _cut(microbatches: list[int], parts: int) -> tuple[tuple[int, ...], ...]:
    shares = even(len(microbatches), parts)
    return tuple(tuple(microbatches[share.start : share.stop]) for share in shares if share)


def resume_epoch(place: int, length: EpochLength) -> EpochProgress:
    """The state of an epoch whose first steps were done by a strategy that uses each batch as it is."""
    return replace(EpochProgress(), steps=place, before=min(place * length.batch, length.total))
