"""One result for each kind of sum, on any layout of workers and machines, and the bytes that leave a machine for it.

The same training, a batch of 16 microbatches, on each layout: a number of workers for each machine. The fingerprint is
that of the trained state; the bytes are counted by the kernel on the machine's link, the most of all machines, as
multiples of the gradients' size G. A run fails if two layouts differ.

    python bench/machines/bits.py                                    # as root
    python bench/machines/bits.py --layouts 1,2+2,1+2+2 --steps 5
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from launched import run
from namespaces import network, obstacle

KINDS = ("exact", "fixed-point")
LAYOUTS = "1,2,3,4,5,6,7,8,1+1,2+1,2+2,3+2,4+4,8+8,1+1+1+1,2+1+1+1,2+2+2+2,4+4+4+4"


def layout_of(text: str) -> list[int]:
    """The workers of each machine: 2+1 is two on the first and one on the second."""
    return [int(workers) for workers in text.split("+")]


def main() -> None:
    """Run all layouts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default=LAYOUTS, help="workers of each machine, as 2+1")
    parser.add_argument("--megabytes", type=int, default=20, help="of gradients")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    missing = obstacle()
    if missing:
        raise SystemExit(f"left out, as {missing}")
    results: dict[str, set[str]] = {kind: set() for kind in KINDS}
    print(f"{'workers':>16} " + " ".join(f"{kind:>12} {'bytes / G':>10}" for kind in KINDS))
    for text in options.layouts.split(","):
        layout, row = layout_of(text), []
        with network(len(layout), None) as names, tempfile.TemporaryDirectory() as folder:
            for kind in KINDS:
                everyone = run(names, layout, Path(folder) / kind, f"bits-{kind}", options.megabytes, options.steps)
                results[kind].update(one["fingerprint"] for one in everyone)
                crossed = max(one["bytes"] for one in everyone) / everyone[0]["gradients"]
                row.append(f"{everyone[0]['fingerprint'][:12]:>12} {crossed:10.2f}")
        print(f"{text:>16} " + " ".join(row), flush=True)
    differing = [kind for kind in KINDS if len(results[kind]) > 1]
    if differing:
        raise SystemExit(f"different results: {', '.join(differing)}")


if __name__ == "__main__":
    main()
