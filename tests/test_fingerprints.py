"""Some of the runs of ``bench/fingerprints`` still end with the bits of the list that is kept there."""

import json
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import PACELINE, Command, ForkServer

from paceline.step.numerics import canary

FOLDER = Path(__file__).parents[1] / "bench" / "fingerprints"
KEPT = json.loads((FOLDER / "fingerprints.json").read_text(encoding="utf-8"))
HERE = {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(), "canary": canary()}

pytestmark = pytest.mark.skipif(
    any(KEPT[key] != value for key, value in HERE.items()),
    reason=f"the list was made with {[KEPT[key] for key in HERE]}, this is {HERE}: the bits may differ",
)


@pytest.fixture
def bench(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The benchmark's functions, whose runs are forked."""
    monkeypatch.syspath_prepend(FOLDER)
    functions = runpy.run_path(str(FOLDER / "__main__.py"))

    def launched(workers: int, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
        out, err = folder / "out", folder / "err"
        words = (*PACELINE, "run", "-n", str(workers), "--quiet", "--runs-dir", str(folder), *command)
        code = fork_server.run(Command(words, functions["environment"](), out, err), 280.0)
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())

    functions["trained"].__globals__["launched"] = launched
    return functions


@pytest.mark.slow
def test_the_bits_are_those_of_the_list(bench: dict[str, Any]) -> None:
    """Every strategy for three workers: all-reduce, stealing, backup, averaging, servers, pipelines."""
    everything = list(bench["all_trained"](["transformer, 3 workers, strategy"]))
    assert [line for found in everything for line in bench["compared"](found, KEPT["values"], complete=False)] == []
    assert sum(len(found.values) for found in everything) > 20


def test_other_bits_are_named(bench: dict[str, Any]) -> None:
    name = "double, 1 workers, strategy=single, exact=True"
    (found,) = bench["all_trained"](["double, 1 workers"])
    assert bench["compared"](found, KEPT["values"], complete=False) == []
    wrong = bench["compared"](found, KEPT["values"] | {name: "0" * 64}, complete=False)
    assert wrong == [f"{name}: {KEPT['values'][name]}, not {'0' * 64}"]
