"""Step time with ``communication="auto"`` beside that of fixed buckets and formats, on shaped links.

The workers are network namespaces, one worker each, and train the perceptron of ``bench/machines`` with ``exact=True``,
two microbatches for each worker. All ways are measured in turn, several times, on the same links. The regret is the
step time of what ``auto`` has chosen over that of the best fixed way, less 1: as a run with ``auto`` has measured it
after its choice, and as the runs with the chosen way fixed have measured it.

    python bench/communication.py                                   # as root
    python bench/communication.py --workers 4 --rates 300mbit --tolerances rounding --rounds 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("machines")))
from launched import run
from namespaces import network, obstacle

FORMATS = {
    "bits": ("float32",),
    "rounding": ("float32", "bfloat16", "fp8-e4m3", "int8"),
    "convergent": ("float32", "bfloat16", "fp8-e4m3", "int8", "fp8-e5m2", "int-auto"),
}
SIZES = ("none", "1")
SETTLED = 50
"""Steps until a run has chosen."""
STEPS = 12


def chosen(folder: Path) -> dict[str, Any]:
    """Return the last record of a choice of rank 0."""
    records = map(json.loads, (folder / "events" / "rank-0.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] == "communication"][-1]


def measure(rate: str, workers: int, tolerances: Sequence[str], megabytes: int, rounds: int) -> list[str]:
    """Return a line for each way and tolerance on links of a rate."""
    fixed = [f"fixed-{wire}@{size}" for wire in FORMATS[tolerances[-1]] for size in SIZES]
    seconds, picked = defaultdict[str, list[float]](list), defaultdict[str, Counter[str]](Counter)
    predicted = defaultdict[str, list[float]](list)
    with network(workers, rate) as names, tempfile.TemporaryDirectory() as place:
        for turn in range(rounds):
            for way in [*fixed, *(f"auto-{one}" for one in tolerances)]:
                folder, auto = Path(place) / f"{turn}-{way}", way.startswith("auto")
                os.environ["PACELINE_RUN"] = str(folder) + "-run"
                first, *_ = run(names, [1] * workers, folder, way, megabytes, STEPS + SETTLED * auto)
                seconds[way].append(statistics.median(first["seconds"][-STEPS:]))
                if auto:
                    last = chosen(Path(os.environ["PACELINE_RUN"]))
                    picked[way][f"fixed-{last['wire']}@{last['bucket_megabytes'] or 'none'}"] += 1
                    predicted[way].append(last["predicted"] or 0.0)
    times = {way: statistics.median(found) for way, found in seconds.items()}
    lines = [f"{workers} workers, {rate:>8}  {way:>22}  {times[way]:.3f} s" for way in fixed]
    for way in (f"auto-{one}" for one in tolerances):
        within = [one for one in fixed if one.split("-", 1)[1].split("@")[0] in FORMATS[way.split("-")[1]]]
        best = min(within, key=times.__getitem__)
        own = picked[way].most_common(1)[0][0].replace(".0", "")
        regret, fixed_regret = times[way] / times[best] - 1, times.get(own, times[best]) / times[best] - 1
        lines.append(
            f"{workers} workers, {rate:>8}  {way:>22}  {times[way]:.3f} s  predicted {predicted[way][-1]:.3f} s  "
            f"picked {dict(picked[way])}  best {best}  regret {regret:+.1%}, of the same way fixed {fixed_regret:+.1%}"
        )
    return lines


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rates", default="1gbit,200mbit,100mbit", help="of the links, as tc writes them")
    parser.add_argument("--tolerances", default="bits,rounding,convergent", help="the last one decides what is fixed")
    parser.add_argument("--megabytes", type=int, default=8, help="of gradients in float32")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds in which the ways are measured in turn")
    options = parser.parse_args()
    missing = obstacle()
    if missing:
        raise SystemExit(f"left out, as {missing}")
    for rate in options.rates.split(","):
        tolerances = options.tolerances.split(",")
        print(*measure(rate, options.workers, tolerances, options.megabytes, options.rounds), sep="\n", flush=True)


if __name__ == "__main__":
    main()
