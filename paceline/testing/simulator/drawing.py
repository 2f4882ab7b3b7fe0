"""A history as a drawing: a line for each thing that happened, a column for each worker.

::

       time  0 1 2 3
      2.697  0 1 2 3   membership 0
      3.839  0 1 2 †   worker 3: kill, at 'after update' of step 2
      4.402  0 1 2     membership 1

A number is the rank of a worker; ``+`` it has started, ``~`` it is stopped, ``/`` its network is cut, ``†`` it was
killed, ``.`` it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class History:
    """What happened in a run.

    Attributes:
        lines: virtual time, what the workers are then, and what happened, in words.
    """

    lines: list[tuple[float, dict[int, str], str]] = field(default_factory=list)

    def add(self, time: float, text: str, signs: Mapping[int, str] | None = None) -> None:
        """Add what happened.

        Args:
            time: when, in virtual seconds.
            text: what.
            signs: by worker what it is from now on.
        """
        before = self.lines[-1][1] if self.lines else {}
        gone = {number: " " for number, sign in before.items() if sign in "†."}
        self.lines.append((time, {**before, **gone, **(signs or {})}, text))

    def draw(self, width: int = 160) -> str:
        """Return the drawing; its lines are cut at ``width``."""
        workers = sorted({number for _, signs, _ in self.lines for number in signs})
        columns = {number: len(str(number)) for number in workers}
        head = f"{'time':>9}  {' '.join(map(str, workers))}"
        drawn = [
            f"{time:9.3f}  {' '.join(signs.get(number, ' ').ljust(columns[number]) for number in workers)}  {text}"
            for time, signs, text in self.lines
        ]
        return "\n".join(line[:width].rstrip() for line in [head, *drawn])
