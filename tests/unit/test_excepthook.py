"""What a process prints of an exception that nobody catches, and with which code it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline import env, excepthook
from paceline.errors import InputError, RunFailed


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Install the hook as in a new process; gives the errors that are left to Python."""
    left: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: left.append(error))
    monkeypatch.setattr(excepthook, "_installed", False)
    monkeypatch.delenv(env.RUN_DIRECTORY, raising=False)
    assert callable(paceline.launch)
    return left


def end_by(error: Exception) -> None:
    try:
        raise error
    except Exception as raised:  # noqa: BLE001 - of any kind
        sys.excepthook(type(raised), raised, raised.__traceback__)


def test_an_error_before_the_start_is_one_sentence(
    early: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        end_by(InputError("There is no file a."))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("paceline: InputError: There is no file a. [test_excepthook.py, line ")
    assert said.count("\n") == 1 and not early


def test_a_failed_run_has_printed_its_message(early: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        end_by(RunFailed("rank 1: was killed\nwho: worker 1", 5))
    assert ended.value.code == 5
    assert capsys.readouterr().err.startswith("paceline: RunFailed: rank 1: was killed [")


def test_a_worker_leaves_a_record_before_the_start(
    early: list[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env.RUN_DIRECTORY, str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        end_by(InputError("no"))
    (path,) = tmp_path.glob("errors/rank-*.json")
    record = json.loads(path.read_text())
    assert (ended.value.code, record["exit_code"], record["message"], record["step"]) == (2, 2, "no", None)
    assert capsys.readouterr().err == ""


def test_other_errors_are_left_to_python(early: list[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    end_by(ValueError("theirs"))
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # an interactive Python goes on
    end_by(InputError("no"))
    assert [str(error) for error in early] == ["theirs", "no"]


def test_launch_ends_a_script_by_its_code(tmp_path: Path) -> None:
    script = "import atexit, paceline\natexit.register(print, 'bye')\npaceline.launch(print, workers=0)"
    (tmp_path / "train.py").write_text(script)
    here = os.environ | {"PYTHONPATH": str(Path(paceline.__file__).parents[1])}
    words = [sys.executable, "train.py"]
    ended = subprocess.run(words, cwd=tmp_path, env=here, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "bye\n")
    says = "workers = 0: give the number of workers of each machine, 1 or more."
    assert ended.stderr == f"paceline: ConfigError: {says} [train.py, line 3]\n"
