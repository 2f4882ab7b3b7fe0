"""A checkpoint of a cut model is one of the model: any other layout goes on from it, to the same bits."""

import json
from collections.abc import Callable
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

# HOW: of each run its strategy and the settings of its pipeline in this part, the model, and the steps
SCRIPT = """
import json, os
from pathlib import Path
from pipeline_cases import CUT
from subjects import tell
import paceline

for name, (strategy, pipeline, case, start, stop) in json.loads(os.environ["HOW"]).items():
    folder = Path(os.environ["SAVED"], name)
    given = CUT[case]() | {"exact": True, "strategy": strategy, "pipeline": pipeline, "timeout_seconds": 30}
    session = paceline.start(
        **given, checkpoint={"directory": str(folder), "background": False}, resume="auto" if start else None
    )
    assert session.position == start
    losses = [session.step(batch).loss.hex() for batch in session.batches(steps=stop)]
    session.save()
    tell(**{f"{name} {stop}": [losses, session.fingerprint()]})
"""
STOPS = 2, 4, 5
RUNS: dict[str, tuple[str, list[tuple[int, str, dict[str, Any]]]]] = {
    "undisturbed": ("tied weights", [(1, "single", {})] * 3),
    "all-reduce between": (
        "tied weights",
        [(2, "pipeline", {"schedule": "interleaved"}), (2, "allreduce", {}), (2, "pipeline", {"schedule": "zb-h1"})],
    ),
    "other stages": (
        "batch norm",
        [
            (2, "pipeline", {"schedule": "interleaved"}),
            (3, "pipeline", {"schedule": "1f1b", "cut": ["3", "8"]}),
            (3, "pipeline", {"schedule": "gpipe", "replicas": [1, 2]}),
        ],
    ),
    "one process before and after": (
        "batch norm",
        [(1, "single", {}), (2, "pipeline", {"schedule": "zb-v"}), (1, "single", {})],
    ),
    "batch norm, undisturbed": ("batch norm", [(1, "single", {})] * 3),
}


@pytest.fixture(scope="module")
def results(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What all workers told of each part; the parts that come at the same time on as many workers run together."""
    saved = tmp_path_factory.mktemp("saved")
    found: dict[str, list[Any]] = {}
    for part, (start, stop) in enumerate(zip((0, *STOPS), STOPS, strict=False)):
        for workers in (1, 2, 3):
            how = {
                name: (strategy, pipeline, case, start, stop)
                for name, (case, parts) in RUNS.items()
                for wanted, strategy, pipeline in parts[part : part + 1]
                if wanted == workers
            }
            environment = {"HOW": json.dumps(how), "SAVED": str(saved)}
            for one in printed(SCRIPT, workers, tmp_path_factory.mktemp("part"), environment=environment):
                for name, value in one.items():
                    found.setdefault(name, []).append(value)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", [name for name in RUNS if "undisturbed" not in name])
def test_the_run_is_that_of_one_process(results: dict[str, list[Any]], name: str, stop: int) -> None:
    reference = "undisturbed" if RUNS[name][0] == "tied weights" else "batch norm, undisturbed"
    (alone,) = results[f"{reference} {stop}"]
    workers = RUNS[name][1][STOPS.index(stop)][0]
    assert results[f"{name} {stop}"] == [alone] * workers
