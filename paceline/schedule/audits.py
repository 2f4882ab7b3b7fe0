"""Schedule of audits: the audited steps, and the microbatch that each audit computes twice."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

_MOST_VALUES = 4  # number of values of a name that are audited, including the value of the first steps
_MOST_LATE, _STEPS = 5, 1000
"""Number of audits that changes by the loop may cause in the first steps, and number of steps for one more."""


class NewValues:
    """Values that the loop has set and that no audited step has had.

    A step is audited if a name has such a value for the first time, or keeps it after several changes in a row. So a
    value that changes in each step, as a schedule or a counter does, is audited once; the audits of steps 1, 2, 4 and
    so on follow it from then on. With at most 5 such audits in 1,000 steps, and one in each 1,000 steps after them,
    all audits together compute at most 20 microbatches more in 2,000 steps.

    >>> values, audited = NewValues(), []
    >>> for step in range(20):
    ...     values.add({"coupled": (step != 9, step == 9)} if step in (9, 15) else {})
    ...     if values.are_due(step):
    ...         audited.append(step)
    ...         values.close(late=True)
    >>> audited
    [9]
    """

    def __init__(self) -> None:
        self._audited: dict[str, set[Hashable]] = {}
        self._open: dict[str, Hashable] = {}
        self._changed: frozenset[str] = frozenset()
        self._restless: frozenset[str] = frozenset()
        self._late = 0

    def add(self, changes: Mapping[str, tuple[Hashable, Hashable]]) -> None:
        """Add the changes by the loop before a step: the values before and after, by name."""
        for name, (before, now) in changes.items():
            known = self._audited.setdefault(name, {before})
            self._open.pop(name, None)
            if now not in known and len(known) < _MOST_VALUES:
                self._open[name] = now
        before_it, self._changed = self._changed, frozenset(changes)
        self._restless = self._changed & before_it

    def are_due(self, step: int) -> bool:
        """Return whether a step is to be audited because of its values."""
        return self._late < _MOST_LATE + step // _STEPS and any(name not in self._restless for name in self._open)

    def close(self, late: bool) -> None:
        """Note that the step with the current values is audited; ``late`` if only because of them."""
        for name, value in self._open.items():
            self._audited[name].add(value)
        self._open = {}
        self._late += late


class AuditSchedule:
    """Audits of steps 0, 1, 2, 4, 8 and so on, of every 1,000th step, before saves, after joins, and of the last step.

    A step before which the loop has set something new is audited, too (:class:`NewValues`).

    Args:
        every: interval of additional audits in steps. Defaults to no additional audits.
        saves: interval of checkpoints in steps, or None if it is unknown.
        off: whether audits are disabled.

    >>> schedule = AuditSchedule(every=5)
    >>> [step for step in range(20) if schedule.is_due(step)]
    [0, 1, 2, 4, 5, 8, 10, 15, 16]
    >>> [schedule.microbatch(step, 8) for step in (0, 1, 2, 4, 5, 8, 10)]
    [7, 6, 5, 4, 3, 2, 1]
    """

    def __init__(self, every: int | None = None, saves: int | None = None, off: bool = False) -> None:
        self._every, self._saves, self._off = every, saves, off
        self.last: int | None = None  # last step of the script's current loop, or None if it is unknown
        # step of the last change of the membership, and the ranks that have joined in it
        self.newcomers: tuple[int, list[int]] = 0, []
        self._joined: dict[int, int] = {}
        self._values = NewValues()
        self._changed = -1  # last step that is audited because of new values

    @property
    def enabled(self) -> bool:
        return not self._off

    def look_at(self, step: int, ranks: Sequence[int], later: bool = False) -> None:
        """Schedule audits of workers that have joined before a step, one a step. All workers pass the same values.

        Args:
            later: whether they begin a step later, because this step ends the stall after a loss.
        """
        self.newcomers = step, sorted(ranks)
        self._joined = {step + later + number: rank for number, rank in enumerate(ranks)}

    def joined(self, step: int) -> int | None:
        """Return the rank of the joined worker that the audit of a step covers, or None."""
        return self._joined.get(step)

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

    def add_changes(self, step: int, changes: Mapping[str, tuple[Hashable, Hashable]]) -> None:
        """Note the changes by the loop before a step: the values before and after, by name."""
        if self._off:
            return
        self._values.add(changes)
        if self.is_audited(step):
            self._values.close(late=False)
        elif self._values.are_due(step):
            self._changed = step
            self._values.close(late=True)

    def is_audited(self, step: int) -> bool:
        """Return whether a step is audited: it is due, the script's last one, or the first one with a new value."""
        return self.is_due(step) or (not self._off and step in (self.last, self._changed))

    def microbatch(self, step: int, microbatches: int) -> int:
        """Return the microbatch that an audit computes twice. It is a different one in each regular audit."""
        audits = step.bit_length() + step // 1000 + (step // self._every if self._every else 0)
        return (microbatches - 1 - audits) % microbatches
