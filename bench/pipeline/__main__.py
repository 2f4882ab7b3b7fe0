"""Pipelines: step time against its prediction, torch's pipelining and DistributedDataParallel.

bubble     sleeping layers, 4 workers: the step time of each schedule and its prediction by the simulated clock
peer       computing layers, 2 stages: torch.distributed.pipelining with the same schedule and cut
link       many weights and few activations over links of 200 Mbit/s: DistributedDataParallel
           (creates network namespaces, so it needs root)
stream     PipeDream: how busy its workers are, and its loss after as many samples as a synchronous pipeline
balance    layers of very unequal cost: the step time and its prediction from measured layers

python bench/pipeline                                    # all parts: 8 minutes
python bench/pipeline bubble --schedules 1f1b,zb-v --draw zb-v
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import tempfile
from pathlib import Path

PARTS = ("bubble", "peer", "link", "stream", "balance")
SCHEDULES = ("layerwise", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The options; lists are separated by commas."""
    parser = argparse.ArgumentParser(
        prog="pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (all)")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="part bubble (all synchronous ones)")
    parser.add_argument("--draw", default="1f1b,zb-v", help="part bubble: schedules to be drawn (1f1b,zb-v)")
    parser.add_argument("--workers", type=int, default=4, help="parts bubble, stream, balance (4)")
    parser.add_argument("--base", type=float, default=0.025, help="seconds that a layer sleeps at a time (0.025)")
    parser.add_argument("--steps", type=int, default=5, help="of each session that is measured (5)")
    parser.add_argument("--rounds", type=int, default=2, help="part bubble (2)")
    parser.add_argument("--turns", type=int, default=40, help="part peer: steps of each candidate (40)")
    parser.add_argument("--models", default="mlp,gpt", help="part peer (mlp,gpt)")
    parser.add_argument("--ranks", default="4", help="part link: number of workers (4)")
    parser.add_argument("--data", type=Path, help="part stream: a text (tinyshakespeare beside the repository)")
    parser.add_argument("--output", type=Path, help="file for the numbers, as JSON (none)")
    options = parser.parse_args(arguments)
    options.parts = _some(parser, options.parts or PARTS, PARTS)
    options.schedules = _some(parser, options.schedules.split(","), SCHEDULES)
    options.draw = [name for name in options.draw.split(",") if name in options.schedules]
    return options


def _some(parser: argparse.ArgumentParser, names: list[str] | tuple[str, ...], known: tuple[str, ...]) -> list[str]:
    for name in names:
        if name not in known:
            parser.error(f"there is no {name!r}; there are {', '.join(known)}")
    return list(names)


def main() -> None:
    options = options_of(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # release processes and namespaces on the way out
    results = {}
    with tempfile.TemporaryDirectory(prefix="paceline-pipeline-") as folder:
        for part in options.parts:
            results[part] = importlib.import_module(part).measure(Path(folder), options)
            sys.stdout.flush()
    if options.output:
        options.output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
