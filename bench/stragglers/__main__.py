"""Slow workers: every update rule under patterns of slowness, with real processes.

Computing is emulated by sleeping, so that two cores are enough for eight workers; the number of busy cores
stands beside each result. The parts:

    steps      seconds of a step over the ideal (the work over the sum of the workers' speeds): the whole run, the
               median and the 99th percentile of steps (of windows of 8 steps for rules without common steps);
               whether each sample has counted exactly once; how long a steal takes
    overhead   stealing beside all-reduce when no worker is slow
    exact      whether the bits are those of all-reduce, even when a worker is killed
    task       time to a loss on pictures of digits: loss against seconds and samples
    quotas     steps that really compute, under CPU quotas of the kernel (control groups; needs the right to set them)

    python bench/stragglers                                    # steps and overhead of a few rules: 9 minutes
    python bench/stragglers steps --strategies all --steps 30
    python bench/stragglers task --models mlp --seeds 5 --output plots
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import exactness
import overhead
import quotas
import steps
import task
from patterns import PATTERNS
from rules import RULES, available

PARTS = ("steps", "overhead", "exact", "task", "quotas")


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The options; what is a list is separated by commas."""
    parser = argparse.ArgumentParser(
        prog="stragglers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (steps overhead)")
    parser.add_argument("--patterns", default="all", help=f"of {', '.join(PATTERNS)} (all)")
    parser.add_argument(
        "--strategies", default="allreduce,backup-1,stealing", help=f"all, or some of {', '.join(RULES)}"
    )
    parser.add_argument("--steps", type=int, default=16, help="of each run of the part steps (16)")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16, help="of each worker in a step (16)")
    parser.add_argument("--base", type=float, default=0.1, help="seconds of a microbatch (0.1)")
    parser.add_argument("--period", type=int, help="steps until another worker is slow (200; less in short runs)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="part task: number of seeds, from --seed on (1)")
    parser.add_argument("--rounds", type=int, help="of the part overhead (7 asleep, 18 computing)")
    parser.add_argument("--models", default="mlp", help="part task: of mlp, conv (mlp)")
    parser.add_argument("--data", type=Path, help="part task: MNIST's files instead of scikit-learn's digits")
    parser.add_argument("--output", type=Path, help="folder for results.json and the plots (none)")
    options = parser.parse_args(arguments)
    options.patterns = _some(parser, options.patterns, PATTERNS)
    options.strategies = _some(parser, options.strategies, RULES)
    options.models = _some(parser, options.models, task.MODELS)
    options.parts = _some(parser, ",".join(options.parts) or "steps,overhead", PARTS)
    if options.steps < 4 or options.workers < 2:
        parser.error(f"at least 4 steps and 2 workers are needed, not {options.steps} and {options.workers}")
    if options.rounds is not None and options.rounds < 2:
        parser.error(f"quartiles need at least 2 rounds, not {options.rounds}")
    return options


def _some(parser: argparse.ArgumentParser, text: str, known: object) -> list[str]:
    names = list(known) if text == "all" else text.split(",")  # type: ignore[call-overload]
    for name in names:
        if name not in known:  # type: ignore[operator]
            parser.error(f"there is no {name!r}; there are {', '.join(known)}")  # type: ignore[arg-type]
    return names


def main() -> None:
    options = options_of(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # let go of processes and control groups on the way out
    rules, missing = available(options.strategies)
    print(*missing, sep="\n", end="\n" if missing else "")
    cores = len(os.sched_getaffinity(0))
    told = {key: value for key, value in vars(options).items() if key not in ("output", "data")}
    results: dict[str, dict[str, Any]] = {"options": told, "machine": {"cores": cores}}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-stragglers-")))
        if "steps" in options.parts:
            results["steps"] = steps.measure(folder, rules, options)
        if "overhead" in options.parts:
            results["overhead"] = overhead.measure(folder, options)
        if "exact" in options.parts:
            results["exact"] = exactness.measure(folder, rules, options)
        if "task" in options.parts:
            results["task"] = task.measure(folder, rules, options)
        if "quotas" in options.parts:
            results["quotas"] = quotas.measure(folder, rules, options)
    if options.output:
        keep(options.output, results)


def keep(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write the results and the plots; parts and rules that were not run now stay as they were."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    for part, found in results.items():
        before[part] = {**before.get(part, {}), **found}
    path.write_text(json.dumps(before))
    try:
        import plots
    except ImportError as error:
        sys.exit(f"{path} is written; there are no plots, as {error.name} is missing: pip install matplotlib")
    for name in plots.draw(before, folder):
        print(name)


if __name__ == "__main__":
    main()
