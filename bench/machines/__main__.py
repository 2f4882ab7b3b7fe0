"""Several workers on each of several machines: step time, and bytes that leave each machine, beside DDP on gloo.

Each machine is a network namespace with one link; the bytes are those that the kernel counted on it. Each way runs in
processes of its own, the ways in turns; medians over rounds, and the ratio to the first way of the same round.

    python bench/machines                                        # 2 x 8 and 4 x 4, as fast as the links can
    python bench/machines --layouts 2x1,4x1,2x2 --rate 1gbit --rounds 3
    python bench/machines --layouts 8x1 --rate 200mbit --slow 100mbit
    python bench/machines --layouts 8x1 --rate 200mbit --slow 100mbit --alone    # the sums and nothing else
    python bench/machines --layouts 4x1,2x2 --ways exact,sharded-optimizer,sharded-parameters,sharded-parameters-copied
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from launched import run
from namespaces import network, obstacle

WAYS = "ddp,collective,fast,exact"
ALONE = ("gloo alone", "tree alone")


def measure(layout: str, options: argparse.Namespace) -> None:
    """Print the table of one layout."""
    machines, workers = map(int, layout.split("x"))
    ways = ALONE if options.alone else options.ways.split(",")
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    with network(machines, options.rate, options.slow) as names, tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            for way in ways:
                everyone = run(
                    names, [workers] * machines, Path(folder) / f"{turn}-{way}", way, options.megabytes, options.steps
                )
                slowest = [max(values) for values in zip(*(one["seconds"] for one in everyone), strict=True)]
                crossed = max(one["bytes"] for one in everyone) / everyone[0]["gradients"]
                found[way].append((median(slowest), crossed))
    rate = (options.rate or "unlimited") + (f", one {options.slow}" if options.slow else "")
    print(f"\n{machines} machines x {workers} workers, links {rate}, G = {everyone[0]['gradients'] / 1e6:.1f} MB")
    print(f"{'':26} {'ms a step':>10} {'x ' + ways[0]:>12} {'sent by a machine / G':>22}")
    for way in ways:
        ratios = [one[0] / base[0] for one, base in zip(found[way], found[ways[0]], strict=True)]
        seconds, crossed = median(one[0] for one in found[way]), max(one[1] for one in found[way])
        print(f"{way:26} {1e3 * seconds:10.1f} {median(ratios):12.2f} {crossed:22.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="2x8,4x4", help="machines x workers of each")
    parser.add_argument("--ways", default=WAYS, help="of training; ratios are to the first one")
    parser.add_argument("--rate", help="of each link, as tc writes it: 1gbit")
    parser.add_argument("--slow", metavar="RATE", help="of the last machine's link")
    parser.add_argument("--megabytes", type=int, default=20, help="of gradients")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="time an all-reduce of gloo and the tree without training")
    options = parser.parse_args()
    missing = obstacle()
    if missing:
        raise SystemExit(f"left out, as {missing}")
    for layout in options.layouts.split(","):
        measure(layout, options)
