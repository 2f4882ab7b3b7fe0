"""How fast the dashboard opens a run of 1,000 ranks and 100,000 steps, and how much memory it needs.

The index of such a run holds 100 million records, which takes hours to write. This writes what the dashboard reads of
it: the sums over ranges of steps, as they are after the records were summed up, and the records of a few steps. Then it
asks for every view, as a browser does.

    python bench/dashboard.py [ranks] [steps]
"""

from __future__ import annotations

import json
import resource
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

from paceline.observe.cells import RANGES
from paceline.observe.dashboard.server import Run
from paceline.observe.index import FILE, RecordIndex

VIEWS = ("summary", "series", "stages", "heat", "waits", "membership", "memory", "network", "logs")


def write(run: Path, ranks: int, steps: int) -> None:
    """Write the records of the last steps, and the sums of all."""
    (run / "events").mkdir(parents=True)
    for rank in range(ranks):
        record = {"time": 1.0 * steps, "event": "step", "rank": rank, "generation": 0, "step": steps - 1, "loss": 1.0}
        line = json.dumps(record | {"seconds": 0.1, "waited": 0.0, "awaited": 0.02, "late": 1})
        (run / "events" / f"rank-{rank}.jsonl").write_text(line + "\n")
    index = RecordIndex(run)
    index.update()
    width = 1
    while steps // width >= 2 * RANGES:
        width *= 2
    index.cells()
    index.close()
    with sqlite3.connect(run / FILE) as base:
        base.execute("DELETE FROM cells")
        for event, seconds in (("step", 0.1), ("exchange", 0.03), ("usage", 0.0)):
            sums = width, width * seconds, 1e6 * width, 0.0, 0.02 * width, width, width
            places = ((at, rank) for at in range(steps // width) for rank in range(ranks))
            rows = ((event, at, rank, *sums, at, at + 1) for at, rank in places)
            base.executemany("INSERT INTO cells VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)


def main() -> None:
    given = [int(word) for word in sys.argv[1:]]
    ranks, steps = (given + [1000, 100_000][len(given) :])[:2]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "run", ranks, steps)
        size = (Path(folder) / "run" / FILE).stat().st_size
        run = Run(Path(folder) / "run")
        for what in ("opened", "followed"):
            begin, busy = time.perf_counter(), time.process_time()
            for view in VIEWS:
                start = time.process_time()
                length = len(json.dumps(run.view(view, {})))
                busy_for = 1000 * (time.process_time() - start)
                print(f"{view:12} {busy_for:8.1f} ms of processor time {length / 1e3:10.1f} kB")
            seconds, cpu = time.perf_counter() - begin, time.process_time() - busy
            print(f"{what} in {seconds:.2f} s, {cpu:.2f} s of processor time")
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"{ranks} ranks, {steps} steps, index of {size / 1e6:.0f} MB, memory of the process {most / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
