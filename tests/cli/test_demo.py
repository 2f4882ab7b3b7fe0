import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import demo

Script = Callable[..., Path]
Paceline = Callable[..., Any]

TRAINS = """
epochs = [{"loss": 2.0, "accuracy": 0.5}, {"loss": 0.5, "accuracy": 0.961}]
fingerprint = "abc" if len(sys.argv) < 3 else os.environ["WORLD_SIZE"]
if rank == 0:
    Path(sys.argv[1]).write_text(json.dumps({"epochs": epochs, "fingerprint": fingerprint}))
"""


def test_the_demo_shows_curve_accuracy_and_hashes(
    paceline: Paceline, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SCRIPT", script(TRAINS))
    result = paceline("demo", "-n", 2)
    assert result.code == 0
    assert "test accuracy: 96.1%" in result.out
    assert "2 workers  abc\n1 worker   abc\nthe same bits" in result.out
    assert "█" * 24 in result.out or "#" * 24 in result.out


def test_the_demo_fails_when_the_hashes_differ(
    paceline: Paceline, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SCRIPT", script(TRAINS.replace("len(sys.argv) < 3", "False")))
    result = paceline("demo", "-n", 2)
    assert result.code == 1
    assert "differ" in result.err


@pytest.mark.slow
def test_the_script_of_the_demo_reads_digits(tmp_path: Path) -> None:
    """As it is started: Python looks for modules in its folder first."""
    result = tmp_path / "result.json"
    ended = subprocess.run([sys.executable, demo.SCRIPT, result], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(result.read_text())["epochs"][-1]["accuracy"] > 0.9


def test_without_scikit_learn(paceline: Paceline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = paceline("demo")
    assert result.code == 2
    assert 'pip install "paceline[demo]"' in result.err
