"""First step at which two runs part: by their chains, then by bisection with replays. No torch.

::

    step          0  1  2  3  4  5  6  7
    chain a       =  =  =  =  =  ≠  ≠  ≠      the records part at step 5
    parameters             ≠  ≠               replays find the step, if the loss shows a difference later

A chain that differs once differs in all later steps, so the records are bisected, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from paceline.diagnostics.replay.recorded import RecordedRun


def first_recorded(one: RecordedRun, two: RecordedRun) -> int | None:
    """Return the first step whose records differ, or None if all steps that both runs have are equal."""
    common = sorted(one.steps.keys() & two.steps.keys())
    at = bisect_left(common, True, key=lambda step: one.steps[step].chain != two.steps[step].chain)
    if at == len(common):
        return None
    if _differs(one, two, common[at]):
        return common[at]
    # a strategy that cuts the model chains less than others, or the step that differs was not recorded
    return next((step for step in common if _differs(one, two, step)), common[at] if at else None)


def _differs(one: RecordedRun, two: RecordedRun, step: int) -> bool:
    return bool(one.steps[step].difference(two.steps[step], chains=False))


def first_of(last_equal: int, first_different: int, differs: Callable[[int], bool]) -> int:
    """Return the first step after which the runs differ, by bisection that begins with the last steps.

    Args:
        last_equal: step after which they are known to be equal.
        first_different: later step after which they are known to differ.
        differs: returns whether they differ after a step.

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
