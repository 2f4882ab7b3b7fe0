import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.launchers import runs
from paceline.launchers.base import Request
from paceline.launchers.prepare import prepare

NOON = time.mktime((2030, 1, 2, 12, 0, 0, 0, 0, -1))


def made(tmp_path: Path, name: str, script: str = "train.py", saved: float | None = None) -> Path:
    run = tmp_path / name
    run.mkdir()
    (run / "launch.json").write_text(json.dumps({"script": f"/somewhere/{script}"}))
    if saved is not None:
        manifest = run / "checkpoints" / "step-10" / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()
        os.utime(manifest, (saved, saved))
    return run


def test_a_run_is_named_after_script_and_time(tmp_path: Path) -> None:
    request = Request(Path("a/train.py"), runs=tmp_path)
    names = []
    for _ in range(3):
        run = runs.choose(request, NOON)
        run.mkdir()
        names.append(run.name)
    assert names == ["train-20300102-120000", "train-20300102-120000-2", "train-20300102-120000-3"]


def test_a_taken_name_is_refused_unless_the_run_resumes(tmp_path: Path) -> None:
    run = made(tmp_path, "mine")
    with pytest.raises(ConfigError, match=r"exists already.*--resume auto, or choose another"):
        runs.choose(Request(Path("train.py"), runs=tmp_path, name="mine"))
    assert runs.choose(Request(Path("train.py"), runs=tmp_path, name="mine", settings={"resume": "auto"})) == run


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_a_name_is_one_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name"):
        runs.choose(Request(Path("train.py"), runs=tmp_path, name=name))


def test_resume_auto_takes_the_newest_checkpoint_of_this_script(tmp_path: Path) -> None:
    made(tmp_path, "train-1", saved=100)
    newest = made(tmp_path, "train-2", saved=300)
    made(tmp_path, "train-3", saved=200)
    made(tmp_path, "train-4")  # nothing saved
    made(tmp_path, "train-big-5", script="train-big.py", saved=400)
    (tmp_path / "train-6" / "checkpoints" / "step-1").mkdir(parents=True)  # never completed
    request = Request(Path("train.py"), runs=tmp_path, settings={"resume": "auto"})
    assert runs.choose(request) == newest


def test_resume_auto_without_a_checkpoint_starts_afresh(tmp_path: Path) -> None:
    request = Request(Path("train.py"), runs=tmp_path / "none", settings={"resume": "auto"})
    assert runs.choose(request, NOON).name == "train-20300102-120000"


def test_a_checkpoint_that_its_run_removes_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, other = made(tmp_path, "train-1", saved=100), made(tmp_path, "train-2", saved=300)
    step = other / "checkpoints" / "step-10"
    (step / "saved").mkdir()
    (step / "manifest.json").rename(step / "saved" / "manifest.json")
    scandir = os.scandir

    def removing(path: Any = ".") -> Any:
        if str(path) == str(step):
            step.rename(tmp_path / "removed")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert runs.choose(Request(Path("train.py"), runs=tmp_path, settings={"resume": "auto"})) == kept
    assert (tmp_path / "removed").exists()


def test_files_that_are_removed_after_the_look_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path, "train-1", saved=100)
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [*glob(path, pattern), path / "gone" / Path(pattern).name])
    assert runs.found(tmp_path, None) == run
    assert runs.newest_manifest(run) == (100, run / "checkpoints" / "step-10" / "manifest.json")


def test_who_looks_for_runs_reads_no_half_written_facts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    request = Request(script, runs=tmp_path, name="mine", settings={"resume": "auto"})
    with prepare(request) as launch:
        facts = (launch.run / "launch.json").read_text()
    with (launch.run / "launch.json").open() as reading, prepare(request):
        assert reading.read() == facts
    assert not list(launch.run.glob(".launch*"))
