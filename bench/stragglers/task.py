"""Time to a loss: a perceptron and a small convolution net on pictures of digits, five patterns, several seeds.

All rules train with the same batch, and with the learning rate that is best for plain synchronous training. Rules whose
updates use older weights are also tuned, over GRID: the whole batch in each update, or a worker's part of it, with its
learning rates; and STALENESS for the bounded server. Each combination is tried with the first seed and no slow worker;
the one that reaches the target first then runs through all patterns and seeds.
"""

from __future__ import annotations

import argparse
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rules import Rule
from runs import Record, RunFailed, run
from steps import pattern_of

MICROBATCHES = 8
"""Of each worker in a step."""
SAMPLES = 2
"""Of a microbatch."""
SMOOTH = 3
"""So many measurements in a row decide; the same as in the workers' script."""
BASE_SECONDS = 0.008
GRID = ((1, 0.1), (1, 0.2), (8, 0.05), (8, 0.1), (8, 0.2), (8, 0.4))
"""Divisor of the batch for an update, and the learning rate."""
STALENESS = (1, 3)
_LONGEST = 2
"""Limit of the samples of a run, as a multiple of those that synchronous training needs at most."""


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        rate: the best learning rate for synchronous training, of 0.03, 0.1, 0.2, 0.4, 0.8, 1.6.
        target: the held-out loss to reach.
        steps: after which synchronous training has reached it in every case.
    """

    rate: float
    target: float
    steps: int


MODELS = {"mlp": Model(0.8, 0.5, 40), "conv": Model(0.4, 0.5, 80)}


def measure(folder: Path, rules: Sequence[Rule], options: argparse.Namespace) -> dict[str, Any]:
    """Race all rules; print the table of seconds and of ratios to stealing."""
    results: dict[str, Any] = {}
    for model in options.models:
        print(f"\n{model}: seconds to a held-out loss of {MODELS[model].target}, median of {options.seeds} seeds")
        print(
            f"{'rule':22} {'rate':>5} {'pattern':10} {'seconds':>8} {'samples':>8} {'over stealing':>14} {'machine':>8}"
        )
        found: dict[str, Any] = {}
        for rule in rules:
            entries = [Entry(rule.name, rule, MODELS[model].rate)]
            if not rule.steps:
                entries.append(tuned(folder, model, rule, options))
            for entry in entries:
                found[entry.name] = race_all(folder, model, entry, options)
        for name, raced in found.items():
            show(name, raced, found.get("stealing"))
        results[model] = {"target": MODELS[model].target, "rules": found}
    return results


@dataclass(frozen=True)
class Entry:
    """Participant in a race: a rule, its learning rate, and the divisor of the batch for an update."""

    name: str
    rule: Rule
    rate: float
    part: int = 1


def tuned(folder: Path, model: str, rule: Rule, options: argparse.Namespace) -> Entry:
    """The best of the grid for a rule."""
    variants = [rule]
    if rule.settings.get("server", {}).get("mode") == "bounded":
        variants = [
            Rule(f"{rule.name} s={bound}", {**rule.settings, "server": {"mode": "bounded", "staleness": bound}}, False)
            for bound in STALENESS
        ]
    grid = [Entry(f"{one.name}, tuned", one, rate, part) for one in variants for part, rate in GRID]
    sessions = [session(model, entry, "none", options.seed, options) for entry in grid]
    records = race(folder, f"{model}-{rule.name}-grid", sessions, options)
    seconds = [curve(record, MODELS[model].target)["seconds"] or float("inf") for record in records]
    for entry, found in zip(grid, seconds, strict=True):
        print(f"   {entry.name}: rate {entry.rate}, 1/{entry.part} of the batch: {found:.2f} s", flush=True)
    return grid[min(range(len(grid)), key=lambda place: (seconds[place], place))]


def race_all(folder: Path, model: str, entry: Entry, options: argparse.Namespace) -> dict[str, Any]:
    """All patterns and seeds with one entry."""
    cases = [(pattern, seed) for pattern in options.patterns for seed in range(options.seeds)]
    sessions = [session(model, entry, pattern, options.seed + seed, options) for pattern, seed in cases]
    label = re.sub(r"\W+", "-", entry.name)
    found: dict[str, Any] = {pattern: {"curves": []} for pattern in options.patterns}
    told = {"rate": entry.rate, "part": entry.part, "patterns": found}
    try:
        records = race(folder, f"{model}-{label}", sessions, options)
    except RunFailed as failed:
        print(f"{entry.name}: {failed}", flush=True)
        return {**told, "patterns": {}}
    for (pattern, _), record in zip(cases, records, strict=True):
        found[pattern]["curves"].append(curve(record, MODELS[model].target))
    for one in found.values():
        one["seconds"] = middle([each["seconds"] for each in one["curves"]])
        one["samples"] = middle([each["samples"] for each in one["curves"]])
        one["given_up_after"] = min(
            [each["given_up_after"] for each in one["curves"] if each["seconds"] is None] or [0]
        )
        one["machine_cores"] = median(each["machine_cores"] for each in one["curves"])
    print(f"   {entry.name} done", flush=True)
    return told


def race(folder: Path, name: str, sessions: list[dict[str, Any]], options: argparse.Namespace) -> list[Record]:
    return run(folder, name, sessions, options.workers, script="task_worker.py", deadline=3600)


def session(model: str, entry: Entry, pattern: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One race of a plan for the workers."""
    microbatches = MICROBATCHES * options.workers // entry.part
    return {
        "pattern": {**asdict(pattern_of(pattern, options)), "seed": seed, "period": MODELS[model].steps // 3},
        "base": BASE_SECONDS,
        "slot": None if entry.rule.steps else MICROBATCHES * BASE_SECONDS,
        "batch": microbatches * SAMPLES,
        "steps": MODELS[model].steps * _LONGEST * entry.part,
        "model": model,
        "seed": seed,
        "rate": entry.rate,
        "target": MODELS[model].target,
        "data": [str(options.data)] if options.data else [],
        "settings": {**entry.rule.settings, "microbatches": microbatches},
    }


def curve(record: Record, target: float) -> dict[str, Any]:
    """The held-out loss over time, and when it first was at the target; none if never."""
    begin, done = record.begin, record.done
    measured = sorted((moment - begin, loss) for one in record.workers for moment, loss in one["measured"])
    points = [(moment, SAMPLES * bisect_right(done, moment), loss) for moment, loss in measured]
    reached = None
    for place in range(SMOOTH, len(points) + 1):
        if sum(loss for _, _, loss in points[place - SMOOTH : place]) / SMOOTH <= target:
            reached = points[place - 1]
            break
    return {
        "points": points,
        "seconds": reached[0] if reached else None,
        "samples": reached[1] if reached else None,
        "given_up_after": None if reached else record.seconds,
        "machine_cores": record.machine_cores,
    }


def middle(values: Sequence[float | None]) -> float | None:
    """The median, where none is later than all; none if it is itself."""
    found = sorted(float("inf") if value is None else value for value in values)
    value = found[len(found) // 2]
    return None if value == float("inf") else value


def show(name: str, entry: dict[str, Any], stealing: dict[str, Any] | None) -> None:
    for pattern, one in entry["patterns"].items():
        base = stealing["patterns"].get(pattern, {}).get("seconds") if stealing else None
        seconds = f"{one['seconds']:8.2f}" if one["seconds"] else f">{one['given_up_after']:7.2f}"
        samples = f"{one['samples']:8d}" if one["samples"] else "       -"
        ratio = f"{one['seconds'] / base:14.2f}" if one["seconds"] and base else f"{'-':>14}"
        print(f"{name:24} {entry['rate']:5} {pattern:10} {seconds} {samples} {ratio} {one['machine_cores']:8.2f}")
