"""First step in which two runs differ: by their records, then by bisection with replays. No torch.

::

    step          0  1  2  3  4  5  6  7
    records       =  =  =  =  =  ≠  ≠  ≠      part at step 5
    state         =  =  =  ≠  ≠  ≠  ≠  ≠      replays find step 3, whose difference the loss of step 5 shows first
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.diagnostics.replay.recorded import RecordedRun


def first_recorded(one: RecordedRun, two: RecordedRun) -> int | None:
    """Return the first step whose records differ, or None if all steps that both runs have are equal."""
    common = sorted(one.steps.keys() & two.steps.keys())
    return next((step for step in common if one.steps[step].difference(two.steps[step])), None)


def first_of(last_equal: int, first_different: int, differs: Callable[[int], bool]) -> int:
    """Return the first step after which the runs differ, by bisection that begins with the last steps.

    Args:
        first_different: later step after which they are known to differ.

    >>> first_of(-1, 8, lambda step: step >= 3)
    3
    """
    back = 1  # a record soon shows a difference
    while first_different - last_equal > 1:
        middle = max(first_different - back, (last_equal + first_different) // 2)
        if differs(middle):
            first_different, back = middle, 2 * back
        else:
            last_equal = middle
    return first_different


def changes(one: RecordedRun, two: RecordedRun) -> list[str]:
    """Return what was different at the start of two runs: script, arguments, settings, code and versions."""
    found = []
    for name in ("script", "arguments", "settings", "versions"):
        mine, theirs = one.launch.get(name), two.launch.get(name)
        if mine != theirs:
            found.append(f"{name}: {mine} and {theirs}")
    mine, theirs = (run.starts[-1].get("code", {}) for run in (one, two))
    found += [f"code of {name}" for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    return found
