"""Seconds of a step over the ideal, for each rule and pattern."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from measures import miscounted, of_microbatches, of_steps, percentile, settled_after
from patterns import Pattern
from rules import Rule
from runs import Record, RunFailed, run
from worker import RATE

SAMPLES = 2
"""Of a microbatch: few, as what is computed is asleep."""


def session(rule: Rule, pattern: Pattern, options: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    """One session of a plan for the workers."""
    microbatches = options.microbatches * pattern.workers
    return {
        "pattern": asdict(pattern),
        "base": options.base,
        "slot": None if rule.steps else microbatches * options.base / pattern.workers,
        "batch": microbatches * SAMPLES,
        "steps": options.steps,
        "settings": {**rule.settings, "microbatches": microbatches, **settings},
    }


def pattern_of(name: str, options: argparse.Namespace) -> Pattern:
    period = options.period or min(200, max(8, options.steps // 3))
    return Pattern(name, options.workers, options.seed, period)


def measure(folder: Path, rules: Sequence[Rule], options: argparse.Namespace) -> dict[str, Any]:
    """Run every rule through all patterns; print a line for each as soon as it is there."""
    print(f"\nseconds of a step over the ideal, {options.workers} workers, {options.microbatches} microbatches each")
    print(
        f"{'rule':14} {'pattern':10} {'whole':>7} {'median':>7} {'p99':>7} {'samples':>9} {'cores':>6} {'machine':>8}"
    )
    results: dict[str, Any] = {}
    patterns = [pattern_of(name, options) for name in ["none", *options.patterns]]
    for rule in rules:
        try:
            sessions = [session(rule, pattern, options) for pattern in patterns]
            records = run(folder, f"steps-{rule.name}", sessions, options.workers)
        except RunFailed as failed:
            print(f"{rule.name:14} {failed}", flush=True)
            continue
        results[rule.name] = {}
        for pattern, record in zip(patterns, records, strict=True):
            found = results[rule.name][pattern.name] = result(rule, pattern, record, options)
            show(rule.name, pattern.name, found)
        steals = [event["seconds"] for event in records[0].events if event["event"] == "steal"]
        if steals:
            results[rule.name]["steals"] = found = {
                "count": len(steals),
                "median_seconds": median(steals),
                "p99_seconds": percentile(steals, 99),
            }
            middle, tail = 1e3 * found["median_seconds"], 1e3 * found["p99_seconds"]
            print(f"{rule.name:14} {len(steals)} steals: median {middle:.2f} ms, p99 {tail:.2f} ms", flush=True)
    return results


def result(rule: Rule, pattern: Pattern, record: Record, options: argparse.Namespace) -> dict[str, Any]:
    """What one session shows."""
    microbatches = options.microbatches * pattern.workers
    if rule.steps:
        ends = [worker["ends"] for worker in record.workers]
        ratios = of_steps(ends, pattern, microbatches, options.base)
    else:
        ratios = of_microbatches(record.done, pattern, microbatches, options.base)
    once = RATE / (microbatches * SAMPLES)
    return {
        **asdict(ratios),
        "miscounted": miscounted(record.workers[0]["tally"], once),
        "cores": record.cores,
        "machine_cores": record.machine_cores,
        "alike": len(record.fingerprints) == 1,
        "remarks": record.workers[0]["remarks"],
        "within_1.06_after": settled_after(ratios.each, 1.06) if rule.steps else None,
    }


def show(rule: str, pattern: str, found: dict[str, Any]) -> None:
    samples = "all once" if not found["miscounted"] else f"{found['miscounted']} not"
    print(
        f"{rule:14} {pattern:10} {found['whole']:7.3f} {found['median']:7.3f} {found['tail']:7.3f} {samples:>9} "
        f"{found['cores']:6.2f} {found['machine_cores']:8.2f}",
        flush=True,
    )
