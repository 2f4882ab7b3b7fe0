"""Some of the runs of ``bench/fingerprints`` still end with the bits of the list that is kept there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.step.numerics import canary

FOLDER = Path(__file__).parents[1] / "bench" / "fingerprints"
KEPT = json.loads((FOLDER / "fingerprints.json").read_text(encoding="utf-8"))
HERE = {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(), "canary": canary()}

pytestmark = pytest.mark.skipif(
    any(KEPT[key] != value for key, value in HERE.items()),
    reason=f"the list was made with {[KEPT[key] for key in HERE]}, this is {HERE}: the bits may differ",
)


def fingerprints(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_the_bits_are_those_of_the_list() -> None:
    """Every strategy for three workers: all-reduce, stealing, backup, averaging, servers, pipelines."""
    ended = fingerprints("--only", "transformer, 3 workers, strategy")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(ended.stdout.splitlines()) > 20


def test_other_bits_are_named(tmp_path: Path) -> None:
    name = "double, 1 workers, strategy=single, exact=True"
    values = KEPT["values"] | {name: "0" * 64}
    (tmp_path / "list.json").write_text(json.dumps(KEPT | {"values": values}))
    ended = fingerprints("--only", "double, 1 workers", "--to", tmp_path / "list.json")
    assert ended.returncode == 1
    assert f"{name}: {KEPT['values'][name]}, not {'0' * 64}" in ended.stdout
