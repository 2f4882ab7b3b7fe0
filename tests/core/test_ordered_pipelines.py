"""Pipelines on a transport that runs what it is given in order: none blocks itself, and the bits are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

STEPS = 3
SCRIPT = """
import json, os
import ordered_transport
from pipeline_cases import CUT, train
from subjects import tell

if os.environ["WORLD_SIZE"] != "1":
    ordered_transport.use()
for case, settings in json.loads(os.environ["CASES"]):
    arguments = CUT[case]() | {"exact": True} | settings
    tell(**{json.dumps([case, settings["pipeline"]]): train(arguments, STEPS)["fingerprint"]})
""".replace("STEPS", str(STEPS))

WAYS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("tied weights", {"schedule": "layerwise"}),
        ("tied weights", {"schedule": "gpipe", "recompute": True}),
        ("nested values, random numbers", {"schedule": "1f1b"}),
        ("batch norm", {"schedule": "interleaved", "chunks": 3}),
        # one stage is a Flatten, which returns a view of what it has received
        ("batch norm", {"schedule": "interleaved", "cut": ["1", "7", "8"]}),
        ("batch norm", {"schedule": "zb-h1"}),
        ("skips", {"schedule": "zb-v"}),
        ("strides", {"schedule": "zb-v", "cut": ["4", "6", "9"]}),
    ],
    4: [
        ("a weight used five times", {"schedule": "layerwise"}),
        ("two microbatches", {"schedule": "gpipe", "replicas": [1, 3]}),
        ("batch norm", {"schedule": "1f1b", "replicas": [1, 2, 1]}),
        ("nested values, random numbers", {"schedule": "interleaved", "stages": 4, "cut": ["1", "2", "5"]}),
        ("batch norm", {"schedule": "zb-h1", "stages": 2}),
        ("tied weights", {"schedule": "zb-v", "stages": 4, "cut": ["blocks.0", "blocks.1", "norm"]}),
    ],
}


def run(
    printed: Printed, directory: Path, workers: int, ways: list[tuple[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    strategy = "pipeline" if workers > 1 else "single"
    cases = [(case, {"strategy": strategy, "pipeline": settings if workers > 1 else {}}) for case, settings in ways]
    return printed(SCRIPT, workers, directory, environment={"CASES": json.dumps(cases)}, deadline=200)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_the_bits_are_those_of_one_process(printed: Printed, tmp_path: Path, workers: int) -> None:
    (tmp_path / "alone").mkdir()
    (alone,) = run(printed, tmp_path / "alone", 1, WAYS[workers])
    everyone = run(printed, tmp_path, workers, WAYS[workers])
    for found in everyone:
        for case, settings in WAYS[workers]:
            key = json.dumps([case, settings])
            assert found[key] == alone[json.dumps([case, {}])], key
