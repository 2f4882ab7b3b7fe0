"""Train each of the named runs in turn; rank 0 prints their fingerprints as lines of JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from cases import CASES, STEPS, Case
from models import arguments_of

import paceline
from paceline.step.numerics import canary


def train(case: Case, part: str, folder: Path) -> None:
    """Train for all steps, or the first or the second part of them."""
    arguments = {"threads": 1, **arguments_of(case.model, case.settings)}
    if part != "whole":
        arguments |= {"checkpoint": {"directory": folder}, "resume": "auto"}
    session = paceline.start(**arguments)
    steps = STEPS // 2 if part == "first" else STEPS
    losses = [session.step(batch).loss for batch in session.batches(steps=steps)]
    if part == "first":
        session.save()
    fingerprint = session.fingerprint()
    if session.rank == 0:
        found = {"name": case.name, "fingerprint": fingerprint, "part": part}
        if case.settings.get("server", {}).get("mode", "sync") == "sync" and case.settings["strategy"] != "hogwild":
            found["losses"] = hashlib.sha256(json.dumps([loss.hex() for loss in losses]).encode()).hexdigest()
        print(json.dumps(found), flush=True)


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if os.environ.get("RANK", "0") == "0":
        versions = {
            "torch": torch.__version__,
            "capability": torch.backends.cpu.get_cpu_capability(),
            "canary": canary(),
            "package": str(Path(paceline.__file__).parent),
        }
        print(json.dumps({"versions": versions}), flush=True)
    for case in CASES:
        if case.name in orders["names"]:
            train(case, orders["part"], Path(orders["folder"]) / f"case-{CASES.index(case)}")


if __name__ == "__main__":
    main()
