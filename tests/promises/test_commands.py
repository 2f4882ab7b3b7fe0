"""Commands beside ``paceline run``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from launching import launch
from patience import DEADLINE

SCRIPT = """
from functools import partial
import torch
import paceline

torch.manual_seed(0)
inputs = torch.randn(64, 8)
session = paceline.start(
    model=torch.nn.Linear(8, 1),
    optimizer=partial(torch.optim.AdamW, lr=0.01),
    loss=torch.nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)),
    batch=16,
    exact=SETTING,
)
for batch in session.batches(steps=4):
    session.step(batch)
print("fingerprint", session.fingerprint())
"""
Paceline = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("commands")
    for name, setting in (("train.py", "False"), ("same.py", "True")):
        (made / name).write_text(SCRIPT.replace("SETTING", setting))
    return made


@pytest.fixture(scope="module")
def paceline(fork_server: ForkServer, folder: Path) -> Paceline:
    """Run a command, and return its exit code and what it printed."""

    def run(*words: object, **variables: str) -> tuple[int, str]:
        return launch(fork_server, list(map(str, words)), folder, DEADLINE, **variables)

    return run


@pytest.mark.promise(
    "README.md",
    "`paceline verify train.py` trains your own script for some steps on 1, 2, 3 and 4 workers, compares everything "
    "that was computed, and says why two runs differ.",
)
def test_verify_finds_rounding(paceline: Paceline) -> None:
    code, said = paceline("verify", "--workers", "1,3", "--steps", "2", "train.py")
    assert code == 0 and "3        rounding" in said, said
    assert "3 workers: the bits first differ in" in said and "`--set exact=true` gives the same bits." in said, said


@pytest.fixture(scope="module")
def configured(paceline: Paceline, folder: Path) -> str:
    (folder / "plan.toml").write_text("batch = 16\nseed = 5\nmicrobatches = 4\n")
    words = "--plan", "plan.toml", "--set", "batch=128", "same.py"
    code, said = paceline("config", *words, PACELINE_BATCH="48", PACELINE_SEED="3", COLUMNS="200")
    assert code == 0, said
    return said


@pytest.mark.promise("docs/launch.md", "The first one that names it wins")
def test_where_settings_come_from(configured: str) -> None:
    rows = {words[0]: words[1:3] for words in map(str.split, configured.splitlines()) if len(words) > 2}
    assert rows["batch"] == ["128", "command"]
    assert rows["seed"] == ["3", "environment"]
    assert rows["microbatches"] == ["4", "plan"]
    assert rows["exact"][0] == "true" and rows["strategy"] == ["allreduce", "default"]


@pytest.mark.promise("docs/launch.md", "The script runs up to `paceline.start` and no further")
def test_config_starts_no_training(configured: str) -> None:
    assert "fingerprint" not in configured


@pytest.fixture(scope="module")
def examined(paceline: Paceline, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """What the doctor finds where the script is missing."""
    code, said = paceline("doctor", "--json", "-n", "2", "missing.py")
    found = json.loads(said[said.index("[") if said.lstrip().startswith("[") else said.index("{") :])
    return code, found if isinstance(found, list) else found["findings"]


@pytest.mark.promise("docs/doctor.md", "says for each what it found, why it matters and what to do.")
def test_the_doctor_says_what_to_do(examined: Any) -> None:
    code, findings = examined
    wrong = [one for one in findings if one["status"] == "failure"]
    assert code == 1 and any(one["check"] == "script" for one in wrong), findings
    assert all(one["why"] and one["cure"] for one in wrong)
