"""Fingerprints of stealing with ``exact``, which must be equal even if a worker is killed while it holds a lease."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rules import RULES, Rule
from runs import RunFailed, run
from steps import pattern_of, session

STEPS, KILLED = 8, {"step": 3, "microbatch": 2}
BASE_SECONDS = 0.005


def measure(folder: Path, rules: Sequence[Rule], options: argparse.Namespace) -> dict[str, Any]:
    """Compare the fingerprints of all exact rules with that of all-reduce, pattern by pattern."""
    options = argparse.Namespace(**{**vars(options), "steps": STEPS, "base": BASE_SECONDS})
    patterns = [pattern_of(name, options) for name in options.patterns]
    exact = [rule for rule in rules if rule.bitwise and rule.name != "allreduce"]
    print(f"\nfingerprints with exact after {STEPS} steps: that of all-reduce?", flush=True)
    results: dict[str, Any] = {}
    prints: dict[str, list[set[str]]] = {}
    for rule in [RULES["allreduce"], *exact]:
        sessions = [session(rule, pattern, options, exact=True) for pattern in patterns]
        prints[rule.name] = [one.fingerprints for one in run(folder, f"exact-{rule.name}", sessions, options.workers)]
        same = [got == want for got, want in zip(prints[rule.name], prints["allreduce"], strict=True)]
        results[rule.name] = dict(zip(options.patterns, same, strict=True))
        print(f"{rule.name:14} {_told(results[rule.name])}", flush=True)
    for rule in exact:
        name = f"{rule.name}, a worker killed"
        results[name] = {}
        for place, pattern in enumerate(patterns):
            one = {**session(rule, pattern, options, exact=True), "kill": {"worker": pattern.workers // 2, **KILLED}}
            elastic = ["--elastic", f"1:{pattern.workers}"]
            run_name = f"killed-{rule.name}-{pattern.name}"
            try:
                (record,) = run(folder, run_name, [one], pattern.workers, options=elastic)
            except RunFailed as failed:
                print(failed)
                results[name][pattern.name] = False
                continue
            assert (folder / "records" / run_name / "killed").exists(), "no worker was killed"
            results[name][pattern.name] = record.fingerprints == prints["allreduce"][place]
        print(f"{name}: {_told(results[name])}", flush=True)
    return results


def _told(same: dict[str, bool]) -> str:
    return "  ".join(f"{pattern} {'yes' if one else 'NO'}" for pattern, one in same.items())
