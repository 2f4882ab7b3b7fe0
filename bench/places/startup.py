"""How long a run takes to start, and how long it stalls when a worker is killed, beside the engine's own way.

In each place (this machine, ssh, MPI, Slurm, Ray, Spark) the same training is run alternately by Paceline and by the
engine with plain DDP. Start-up is the time from the command to the end of the first step. The stall is the time from
the kill of a worker to the next new step. Where a user must start the command again after a loss, the bench does so
immediately. Prints the medians over the rounds, and of the ratios within each round. Engines that are not installed are
named and left out.

    python bench/places/startup.py
    python bench/places/startup.py --only slurm --rounds 3
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "places"))

from measure import RUN, Contender, Result, Starter, run
from places import PLACES, NotHere

_SHOWN = 12
"""Number of output lines to show of a run that did not continue."""


def measure(contenders: Sequence[Contender], start: Starter, folder: Path, rounds: int) -> dict[str, list[Result]]:
    """Run all in turns, every other round in the opposite order."""
    found: dict[str, list[Result]] = defaultdict(list)
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            load = os.getloadavg()[0]
            result = run(contender, folder, start)
            found[contender.name].append(result)
            stall = "never" if result.stall is None else f"{result.stall:.2f} s"
            print(f"  {contender.name}: start {result.start:.1f} s, stall {stall} (load before {load:.1f})", flush=True)
            if result.stall is None:
                print(textwrap.indent("\n".join(result.said.splitlines()[-_SHOWN:]), "    | "), flush=True)
    return found


def table(place: str, contenders: Sequence[Contender], found: dict[str, list[Result]]) -> str:
    """The medians, and the medians of the ratios to the engine's own way, over the runs that came to their end."""
    own = found[next(one.name for one in contenders if one.own)]
    lines = [f"| {place} | start | ratio | stall | ratio | went on |", "|---|---|---|---|---|---|"]
    for contender in contenders:
        results = found[contender.name]
        pairs = list(zip(results, own, strict=True))
        stalls = [one.stall for one in results if one.stall is not None]
        cells = [
            f"{statistics.median(one.start for one in results):.1f} s",
            f"{statistics.median(one.start / base.start for one, base in pairs):.2f}",
            f"{statistics.median(stalls):.2f} s" if stalls else "",
            _ratio([one.stall / base.stall for one, base in pairs if one.stall is not None and base.stall is not None]),
            f"{len(stalls)} of {len(results)}",
        ]
        lines.append(" | ".join([f"| `{contender.name}`", *cells]) + " |")
    return "\n".join(lines)


def _ratio(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f}" if ratios else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PLACES), help=f"some of {', '.join(PLACES)}, separated by commas")
    parser.add_argument("--contender", default="", help="only those with this text in their names, and the engine's")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if unknown := [name for name in options.only.split(",") if name not in PLACES]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(PLACES)}")
    if options.rounds < 1:
        parser.error(f"at least 1 round is needed, not {options.rounds}")
    tables = []
    for place in options.only.split(","):
        with tempfile.TemporaryDirectory(prefix="places-", ignore_cleanup_errors=True) as temporary:
            print(f"{place}:", flush=True)
            try:
                with PLACES[place](Path(temporary)) as (start, all_contenders):
                    contenders = [one for one in all_contenders if one.own or options.contender in one.name]
                    found = measure(contenders, start, Path(temporary, RUN), options.rounds)
                    tables.append(table(place, contenders, found))
            except NotHere as error:
                print(f"  left out: {error}")
    print("", *tables, sep="\n\n")


if __name__ == "__main__":
    main()
