"""Recordings of commands in a terminal as pictures that move: what a real run has printed, with its colours.

A shell in a pseudo-terminal runs the commands below, pyte keeps its screen, and each state of a line becomes a text of
an SVG that SMIL shows at its time. Waits of more than a second are cut to one. Viewers without animation show the end.

    python bench/recordings.py            # minutes; needs pyte, and writes docs/images/recording-*.svg
    python bench/recordings.py demo why   # only these
"""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from fcntl import ioctl
from itertools import groupby
from pathlib import Path
from termios import TIOCSWINSZ
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
COMMANDS = {
    "demo": ["paceline demo"],
    "kill": ["paceline run -n 3 --elastic 1:3 spot.py --life 100", "python spot.py"],
    "straggler": ["paceline run -n 4 slow_worker.py"],
    "plan": ["paceline plan --epochs 1000 mlp.py"],
    "why": ["paceline run -n 4 slow_worker.py --only allreduce", "paceline why"],
}
COLUMNS, ROWS = 112, 44
LONGEST_WAIT, HELD_AT_END = 1.0, 5.0
SHORTEST = 0.25  # seconds that a state of the screen is shown at least
SECONDS = 600
WIDTH, HEIGHT, MARGIN = 7.8, 17, 14  # of a character and around all, in pixels
PALETTE = {
    "default": "#e6e6e6",
    "black": "#8b949e",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#f2cc60",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
    "white": "#ffffff",
}
Cells = tuple[tuple[str, str, bool], ...]
"""Runs of a line: text, colour, and whether it is bold."""


def record(commands: list[str], folder: Path) -> list[tuple[float, list[Cells]]]:
    """The states of the screen, and when each began."""
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {"TERM": "xterm-256color", "PS1": "$ ", "PATH": path, "PYTHONPATH": str(ROOT)}
        os.chdir(folder)
        os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "-i"], {**kept, **variables})
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    states: list[tuple[float, list[Cells]]] = []
    waiting, began, now, last = list(commands), time.monotonic(), 0.0, 0.0
    try:
        while True:
            if time.monotonic() - began > SECONDS:
                raise SystemExit(f"{commands} have not ended after {SECONDS} s:\n" + "\n".join(screen.display))
            if not select.select([terminal], [], [], SHORTEST)[0]:
                continue
            time.sleep(SHORTEST)  # until the rest of a redrawn line is there
            stream.feed(os.read(terminal, 1 << 20))
            moment = time.monotonic()
            now, last = now + min(LONGEST_WAIT, moment - (last or moment)), moment
            states.append((now, [_cells(screen.buffer[row], screen) for row in range(ROWS)]))
            if screen.display[screen.cursor.y].rstrip() == "$":
                if not waiting:
                    return states
                os.write(terminal, f"{waiting.pop(0)}\n".encode())
    finally:
        os.kill(pid, signal.SIGHUP)
        os.close(terminal)
        os.waitpid(pid, 0)


def _cells(line, screen) -> Cells:
    cells = [line[column] for column in range(screen.columns)]
    runs = [
        ("".join(one.data for one in run), colour, bold)
        for (colour, bold), run in groupby(cells, key=lambda one: (one.fg, one.bold))
    ]
    while runs and not runs[-1][0].strip():
        runs.pop()
    return tuple(runs)


def versions(states: list[tuple[float, list[Cells]]]) -> Iterator[tuple[int, float, float | None, Cells]]:
    """What each line has shown: its number, when, until when (None: to the end), and the text."""
    for row in range(ROWS):
        shown = [(begin, lines[row]) for begin, lines in states]
        changes = [one for at, one in enumerate(shown) if at == 0 or one[1] != shown[at - 1][1]]
        ends = [begin for begin, _ in changes[1:]]
        for (begin, text), end in zip(changes, [*ends, None], strict=True):
            if text:
                yield row, begin, end, text


def picture(states: list[tuple[float, list[Cells]]]) -> str:
    texts, used = [], 0
    last_row = max(row for row, _, end, _ in versions(states) if end is None)  # the prompt after the last command
    whole = states[-1][0] + HELD_AT_END
    for row, begin, end, runs in versions(states):
        if row == last_row and end is None:
            continue
        used = max(used, row + 1)
        spans, column = [], 0
        for text, colour, bold in runs:
            if text.strip():
                left = len(text) - len(text.lstrip())
                shown, at = text.strip(), MARGIN + (column + left) * WIDTH
                inner = escape(shown.replace(" ", "\N{NO-BREAK SPACE}"))  # viewers join spaces
                fill = PALETTE.get(colour.removeprefix("bright"), f"#{colour}")
                look = f' fill="{fill}"' * (colour != "default") + ' font-weight="bold"' * bold
                spans.append(f'<tspan x="{at:.1f}" textLength="{len(shown) * WIDTH:.1f}"{look}>{inner}</tspan>')
            column += len(text)
        times = [begin / whole, *([] if end is None else [end / whole])]
        values = ["hidden", "visible", *([] if end is None else ["hidden"])]
        if times[0] == 0:
            times, values = times[1:], values[1:]
        moving = (
            f'<animate attributeName="visibility" calcMode="discrete" dur="{whole:.2f}s" repeatCount="indefinite" '
            f'values="{";".join(values)}" keyTimes="{";".join(["0", *(f"{one:.4f}" for one in times)])}"/>'
        )
        hidden = "" if end is None else ' visibility="hidden"'
        texts.append(f'<text y="{MARGIN + (row + 0.8) * HEIGHT:.1f}"{hidden}>{"".join(spans)}{moving}</text>')
    width, height = 2 * MARGIN + COLUMNS * WIDTH, 2 * MARGIN + used * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="13" fill="{PALETTE["default"]}">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>\n' + "\n".join(texts) + "\n</svg>\n"
    )


def main() -> None:
    for name in sys.argv[1:] or COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            for script in (*EXAMPLES.glob("*.py"), *(EXAMPLES / "tutorials").glob("*.py")):
                shutil.copy(script, folder)
            target = ROOT / "docs" / "images" / f"recording-{name}.svg"
            target.write_text(picture(record(COMMANDS[name], Path(folder))), encoding="utf-8")
            print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
