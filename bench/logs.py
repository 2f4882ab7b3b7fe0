"""Time of ``paceline logs``: the first index of a run's records, and searches after it.

Writes the records of 8 workers to a temporary folder: in each step four exchanges and a step, as of a small model.

    python bench/logs.py --megabytes 1000
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from paceline.observe.index import RecordIndex, Search

RANKS = 8
SEARCHES = {
    "slow exchanges of a rank": Search(ranks=("3",), events=("exchange",), slower_than=0.0999),
    "20 steps": Search(steps=range(800, 820)),
    "text": Search(text="lost"),
}
QUERIES = {
    "slowest step": "select rank, step, max(seconds) from records where event = 'step'",
    "bytes of each rank": "select rank, sum(bytes) from records group by rank",
}


def write(run: Path, megabytes: float) -> int:
    """Write event files of this size in total, and return the number of records."""
    (run / "events").mkdir()
    count = 0
    for rank in range(RANKS):
        size, step = 0, 0
        with (run / "events" / f"rank-{rank}.jsonl").open("w") as file:
            while size < megabytes * 1e6 / RANKS:
                common = {"rank": rank, "generation": 0, "step": step}
                for bucket in range(4):
                    seconds = (rank * 7919 + step * 104729 + bucket * 1299709) % 100000 / 1e6
                    record = {"time": 1.7e9 + step * 0.1 + bucket * 0.02, "event": "exchange", **common}
                    record |= {"what": "gradients", "bucket": bucket, "bytes": 1 << 20, "seconds": seconds}
                    size += file.write(json.dumps(record) + "\n")
                done = {"time": 1.7e9 + step * 0.1 + 0.1, "event": "step", **common, "seconds": 0.1, "waited": 0.001}
                done |= {"loss": 2.5, "samples": 256, "samples_per_second": 2560.0, "gradient_norm": 1.25}
                size += file.write(json.dumps(done) + "\n")
                step, count = step + 1, count + 5
            file.write(json.dumps({"time": 1.8e9, "event": "note", **common, "text": f"worker {rank} is lost"}) + "\n")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the event files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        count = write(Path(folder), given.megabytes)
        begin = time.perf_counter()
        index = RecordIndex(Path(folder))
        index.update()
        seconds = time.perf_counter() - begin
        size = (Path(folder) / "logs.sqlite").stat().st_size / 1e6
        print(f"{given.megabytes:.0f} MB, {count:,} records: indexed in {seconds:.1f} s, into {size:.0f} MB")
        begin = time.perf_counter()
        index.update()
        print(f"{time.perf_counter() - begin:8.3f} s  nothing new")
        for name, search in SEARCHES.items():
            begin = time.perf_counter()
            found = sum(1 for _ in index.find(search))
            print(f"{time.perf_counter() - begin:8.3f} s  {name}: {found:,} records")
        for name, query in QUERIES.items():
            begin = time.perf_counter()
            found = len(list(index.query(query).rows))
            print(f"{time.perf_counter() - begin:8.3f} s  {name}: {found:,} rows")
        index.close()


if __name__ == "__main__":
    main()
