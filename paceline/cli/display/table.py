"""Tables as aligned text."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence


def lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns. On a terminal, wrap the last column."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    before = sum(widths) + 2 * len(widths)
    room = max(20, shutil.get_terminal_size().columns - before) if sys.stdout.isatty() else 1000
    text = []
    for row in rows:
        start = "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        wrapped = textwrap.wrap(row[-1], room) or [""]
        text.append((start + wrapped[0]).rstrip())
        text += [" " * before + rest for rest in wrapped[1:]]
    return text
