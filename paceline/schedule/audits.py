"""Schedule of audits: the audited steps, and the microbatch that each audit computes twice."""

from __future__ import annotations

from collections.abc import Sequence


class AuditSchedule:
    """Audits of steps 0, 1, 2, 4, 8 and so on, of every 1,000th step, before saves, after joins, and of the last step.

    Args:
        every: interval of additional audits in steps. Defaults to no additional audits.
        saves: interval of checkpoints in steps, or None if it is unknown.
        off: whether audits are disabled.

    Attributes:
        last: last step of the script's current loop, or None if it is unknown.

    >>> schedule = AuditSchedule(every=5)
    >>> [step for step in range(20) if schedule.is_due(step)]
    [0, 1, 2, 4, 5, 8, 10, 15, 16]
    >>> [schedule.microbatch(step, 8) for step in (0, 1, 2, 4, 5, 8, 10)]
    [7, 6, 5, 4, 3, 2, 1]
    """

    def __init__(self, every: int | None = None, saves: int | None = None, off: bool = False) -> None:
        self._every, self._saves, self._off = every, saves, off
        self.last: int | None = None
        self._joined: dict[int, int] = {}

    @property
    def enabled(self) -> bool:
        """Whether steps are audited at all."""
        return not self._off

    def look_at(self, step: int, ranks: Sequence[int]) -> None:
        """Schedule audits of joined workers, one for each step from ``step`` on. All workers pass the same values."""
        self._joined = {step + number: rank for number, rank in enumerate(ranks)}

    def joined(self, step: int) -> int | None:
        """Return the rank of the joined worker that the audit of a step covers, or None."""
        return self._joined.get(step)

    @property
    def newcomers(self) -> dict[int, int]:
        """Ranks that have joined at the last change of the membership, by the step from which they are audited."""
        return dict(self._joined)

    @classmethod
    def of(cls, audit: int | str, every: int | str | None) -> AuditSchedule:
        """Return the schedule for the settings ``audit`` and ``checkpoint.every``."""
        saves = every if isinstance(every, int) else None
        return cls(audit if isinstance(audit, int) else None, saves, off=audit == "off")

    def is_due(self, step: int) -> bool:
        """Return whether a step is audited because of its number, a save or a join. Equal on all workers."""
        if self._off:
            return False
        if step in self._joined:
            return True
        by_number = step & (step - 1) == 0 or step % 1000 == 0 or (self._every and step % self._every == 0)
        return bool(by_number or (self._saves and (step + 1) % self._saves == 0))

    def is_last(self, step: int) -> bool:
        """Return whether a step is audited because it is the last step."""
        return not self._off and step == self.last

    def microbatch(self, step: int, microbatches: int) -> int:
        """Return the microbatch that an audit computes twice. It changes from audit to audit."""
        audits = step.bit_length() + step // 1000 + (step // self._every if self._every else 0)
        return (microbatches - 1 - audits) % microbatches
