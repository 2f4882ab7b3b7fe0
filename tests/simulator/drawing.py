"""Drawing of a run's history, with a line for each event and a column for each worker.

::

       time  0 1 2 3
      2.697  0 1 2 3   membership 0
      3.839  0 1 2 †   worker 3: kill, at 'after update' of step 2
      4.402  0 1 2     membership 1

A number is the rank of a worker. ``+`` means that it has started, ``~`` that it is stopped, ``/`` that its network is
cut, ``†`` that it was killed, and ``.`` that it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class History:
    """Events of a run."""

    # virtual time, sign of each worker at that time, and description of each event
    lines: list[tuple[float, dict[int, str], str]] = field(default_factory=list)

    def add(self, time: float, text: str, signs: Mapping[int, str] | None = None) -> None:
        """Add an event.

        Args:
            time: virtual seconds.
            signs: new sign of each worker whose state changes.
        """
        before = self.lines[-1][1] if self.lines else {}
        gone = {number: " " for number, sign in before.items() if sign in "†."}
        self.lines.append((time, {**before, **gone, **(signs or {})}, text))

    def draw(self, width: int = 160) -> str:
        """Return the drawing, with its lines cut at ``width`` columns."""
        workers = sorted({number for _, signs, _ in self.lines for number in signs})
        columns = {number: len(str(number)) for number in workers}
        head = f"{'time':>9}  {' '.join(map(str, workers))}"
        drawn = [
            f"{time:9.3f}  {' '.join(signs.get(number, ' ').ljust(columns[number]) for number in workers)}  {text}"
            for time, signs, text in self.lines
        ]
        return "\n".join(line[:width].rstrip() for line in [head, *drawn])
