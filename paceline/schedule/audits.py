"""Which steps are audited, and which microbatch of them is computed twice."""

from __future__ import annotations

from collections.abc import Sequence


class AuditSchedule:
    """Audits of steps 0, 1, 2, 4, 8 and so on, of each 1,000th, before saves, after joins, and of the last one.

    Args:
        every: steps from one further audit to the next; None: there are no further ones.
        saves: steps from one checkpoint to the next, if that is known.
        off: whether there are no audits at all.

    Attributes:
        last: the last step of the loop that the script is in, if that is known.

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

    def look_at(self, step: int, ranks: Sequence[int]) -> None:
        """Audit workers that have joined, each in a step of its own from ``step`` on; all workers call this alike."""
        self._joined = {step + number: rank for number, rank in enumerate(ranks)}

    def joined(self, step: int) -> int | None:
        """Return the rank of a worker that has joined and is to take part in the audit of a step, if there is one."""
        return self._joined.get(step)

    @classmethod
    def of(cls, audit: int | str, every: int | str | None) -> AuditSchedule:
        """Return the schedule for the settings ``audit`` and ``checkpoint.every``."""
        saves = every if isinstance(every, int) else None
        return cls(audit if isinstance(audit, int) else None, saves, off=audit == "off")

    def is_due(self, step: int) -> bool:
        """Whether a step is audited for a reason that follows from the settings alone, alike on all workers."""
        if self._off:
            return False
        if step in self._joined:
            return True
        by_number = step & (step - 1) == 0 or step % 1000 == 0 or (self._every and step % self._every == 0)
        return bool(by_number or (self._saves and (step + 1) % self._saves == 0))

    def is_last(self, step: int) -> bool:
        """Whether a step is audited as the last one."""
        return not self._off and step == self.last

    def microbatch(self, step: int, microbatches: int) -> int:
        """Return the microbatch of an audited step: another one from audit to audit."""
        audits = step.bit_length() + step // 1000 + (step // self._every if self._every else 0)
        return (microbatches - 1 - audits) % microbatches
