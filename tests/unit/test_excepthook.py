"""What a process prints of an exception that nobody catches, and with which code it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.environments import env
from paceline.errors import InputError, RunFailed
from paceline.system import excepthook
from paceline.system.user_code import in_user_call, locations_in_message, without_own_frames


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


def test_an_error_before_the_start_is_one_line(early: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    error = InputError("The index 9 is not in a table.")
    in_user_call(error, "This was microbatch 3.")
    with pytest.raises(SystemExit) as ended:
        end_by(error)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    sentence = "paceline: InputError: The index 9 is not in a table. This was microbatch 3. [test_excepthook.py, line "
    assert said.startswith(sentence)
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


LIBRARY = str(Path(paceline.__file__).parent / "training" / "loop.py")
TORCH = str(Path(torch.__file__).parent / "loader.py")
RAISES = "def call(inner, *more):\n    return inner(*more)\n"


def through(file: str) -> Callable[..., Any]:
    """A function that calls another one, as if it were in this file."""
    names: dict[str, Any] = {}
    exec(compile(RAISES, file, "exec"), names)
    function: Callable[..., Any] = names["call"]
    return function


def raised_by(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - of any kind
        return error
    raise AssertionError


def shown(error: Exception) -> str:
    return without_own_frames(error, error.__traceback__, "see x")


def test_the_users_lines_are_next_to_each_other() -> None:
    ours, theirs, users = through(LIBRARY), through(TORCH), through("train.py")
    error = raised_by(lambda: users(ours, theirs, ours, users, theirs, int, "no number"))
    text = shown(error)
    assert "  [3 lines of Paceline left out; see x]\n" in text and LIBRARY not in text
    assert text.index('File "train.py"') < text.index("[3 lines") < text.rindex('File "train.py"') < text.index(TORCH)
    assert text.endswith("ValueError: invalid literal for int() with base 10: 'no number'\n")
    assert LIBRARY in "".join(traceback.format_exception(error))


def test_an_error_of_the_library_keeps_its_lines() -> None:
    ours, theirs, users = through(LIBRARY), through(TORCH), through("train.py")
    assert shown(raised_by(lambda: users(ours, theirs, int, "no number"))) == ""
    assert shown(raised_by(lambda: users(theirs, int, "no number"))) == ""


def test_a_function_of_a_library_that_the_user_gave() -> None:
    ours, theirs, users = through(LIBRARY), through(TORCH), through("train.py")
    error = raised_by(lambda: users(ours, ours, theirs, int, "no number"))
    in_user_call(error, "This was the forward pass.")
    text = shown(error)
    assert "[2 lines of Paceline" in text and TORCH in text and text.endswith("\nThis was the forward pass.\n")
    wrong = raised_by(lambda: users(ours, ours, lambda: None, 1))  # the call itself is wrong: its line stays
    in_user_call(wrong, "This was the forward pass.")
    assert "[1 line of Paceline" in shown(wrong) and LIBRARY in shown(wrong)


def test_the_cause_of_an_error_is_cut_likewise() -> None:
    ours, users = through(LIBRARY), through("train.py")

    def chained() -> None:
        try:
            users(ours, users, int, "no number")
        except ValueError as error:
            raise KeyError("a") from error

    text = shown(raised_by(lambda: users(ours, chained)))
    assert text.count("[1 line of Paceline") == 2 and "direct cause" in text


class Spoiled(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise EOFError("a file that is cut off")  # not the end of a loader process
        return torch.ones(1)


def started(**given: Any) -> paceline.Session:
    usual = {
        "model": torch.nn.Linear(1, 1),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "forward": lambda model, microbatch: model(microbatch).mean(),
        "data": torch.ones(8, 1),
        "batch": 8,
        "microbatches": 4,
        "exact": True,
    }
    return paceline.start(**(usual | given))


def train(**given: Any) -> None:
    session = started(**given)
    for batch in session.batches():
        session.step(batch)


def test_an_error_of_the_data_names_sample_microbatch_and_step() -> None:
    with pytest.raises(EOFError) as caught:
        train(data=Spoiled(), sampler=lambda seed, epoch: range(8))
    assert caught.value.__notes__ == [
        "The data set was asked for sample 5.",
        "This was the loading of microbatch 2 of step 0.",
    ]


def test_the_line_of_an_error_in_a_loader_process() -> None:
    frames = f'  File "{TORCH}", line 1, in fetch\n  File "/home/me/train.py", line 41, in __getitem__\n'
    text = f"Caught EOFError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n{frames}"
    assert locations_in_message(text) == ["train.py:41"]
    assert locations_in_message(frames) == []


def test_an_error_of_the_forward_pass_names_microbatch_and_step() -> None:
    with pytest.raises(TypeError) as caught:
        train(forward=lambda model, microbatch: model + 1)
    (note,) = caught.value.__notes__
    assert re.fullmatch(r"This was the forward pass of microbatch \d \(2 samples\) of step 0\.", note)


def test_a_data_set_that_leaves_samples_out() -> None:
    class Filtering(Spoiled):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            return [torch.ones(1) for index in indices if index != 5]

    with pytest.raises(InputError, match=r"__getitems__ returned 1 samples when it was asked for 2\."):
        train(data=Filtering())
