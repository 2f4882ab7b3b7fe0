"""What was set outside of the script when a checkpoint was saved holds on resume, and what differs is said."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import PACELINE, Command, ForkServer

import paceline
from paceline import config
from paceline.settings import Settings
from paceline.training import saved_settings

SCRIPT = """
import json, sys
from functools import partial
import torch
import paceline

torch.manual_seed(0)
inputs = torch.randn(64, 4)
session = paceline.start(
    model=torch.nn.Linear(4, 1),
    optimizer=partial(torch.optim.SGD, lr=0.1),
    loss=torch.nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)),
    batch=16,
    clip_norm=float(sys.argv[2]) if sys.argv[2:] else None,
)
for batch in session.batches(steps=int(sys.argv[1])):
    session.step(batch)
settings = session._context.settings
told = {"exact": settings.exact, "every": settings.checkpoint.every, "timeout": settings.timeout_seconds}
print(json.dumps({**told, "position": session.position, "hash": session.fingerprint()}))
"""
Ran = tuple[dict[str, Any], str]


@pytest.fixture
def start(fork_server: ForkServer, tmp_path: Path) -> Callable[..., Ran]:
    """Run the script, under ``paceline`` or not; gives what rank 0 told, and what was said on standard error."""
    (tmp_path / "train.py").write_text(SCRIPT)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}

    def run(*words: str, **variables: str) -> Ran:
        command = Command(words, own | variables, tmp_path / "out", tmp_path / "err", tmp_path)
        code = fork_server.run(command, 100.0)
        out, err = command.out.read_text(), command.err.read_text()
        assert code == 0, out + err
        return json.loads(out.removeprefix("[rank 0] ")), err

    return run


@pytest.mark.slow
def test_what_set_said_holds_on_resume(start: Callable[..., Ran]) -> None:
    run = (*PACELINE, "run")
    setting = "--set", "exact=true", "--set", "checkpoint.every=2", "--set", "timeout-seconds=99"
    whole, _ = start(*run, "-n", "1", "--set", "exact=true", "--name", "whole", "train.py", "8")
    first, said = start(*run, "-n", "2", *setting, "train.py", "4")
    assert (first["exact"], first["timeout"]) == (True, 99.0) and "resume" not in said
    second, said = start(*run, "-n", "3", "--resume", "auto", "train.py", "8")
    assert second == {"exact": True, "every": 2, "timeout": 600.0, "position": 8, "hash": whole["hash"]}
    assert said.count("resume: settings as in step-000004: exact = true, checkpoint.every = 2\n") == 1
    assert "settings differ" not in said
    third, said = start(*run, "--resume", "auto", "--set", "exact=false", "train.py", "10", "0.5")
    assert (third["exact"], third["every"], third["position"]) == (False, 2, 10)
    assert said.count("resume: settings as in step-000008: checkpoint.every = 2\n") == 1
    changed = "exact was true, is false (command line), clip_norm was none, is 0.5 (script)"
    assert said.count(f"resume: settings differ from step-000008: {changed}\n") == 1


def test_without_a_launcher_checkpoints_have_a_place(start: Callable[..., Ran], tmp_path: Path) -> None:
    _, said = start("train.py", "4", PACELINE_CHECKPOINT__EVERY="2")
    assert said == "checkpoints go to checkpoints/train: checkpoint.directory is not set\n"
    assert {path.name for path in (tmp_path / "checkpoints/train").glob("step-*")} == {"step-000002", "step-000004"}
    found, said = start("train.py", "6", PACELINE_RESUME="auto")
    assert (found["position"], found["every"]) == (6, 2)
    assert said.startswith("resume: settings as in step-000004: checkpoint.every = 2\n")
    start("train.py", "1")  # neither saves nor resumes, so it needs no place


def test_each_setting_is_kept_or_of_one_start() -> None:
    known = config.flat_keys()
    assert known.keys() > config.OF_ONE_START
    places = {key for key in known if "directory" in key or "file" in key or "path" in key or "seconds" in key}
    assert places <= config.OF_ONE_START
    kept = config.kept(Settings(), dict.fromkeys(known, "environment"))
    assert kept.keys() == known.keys() - config.OF_ONE_START
    assert config.resolve({}, checkpoint=config.outside(kept)).settings == Settings()


def test_a_checkpoint_of_others_sets_nothing_else() -> None:
    saved: dict[str, list[object]] = {"seed": [3, False], "batch": [8, True], "resume": ["x", False], "new": [1, False]}
    assert config.outside(saved) == {"seed": 3}
    with pytest.raises(config.ConfigError, match=r"seed = \[\] \(from the checkpoint\)"):
        config.resolve({}, checkpoint={"seed": []})


def test_a_checkpoint_without_the_signature_sets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [tmp_path / name for name in ("ab", "cd")]
    for key in keys:
        key.touch(0o600)
        key.write_text(32 * key.name)

    def keyed(key: Path) -> dict[str, Any]:
        return {"batch": 4, "checkpoint": {"directory": str(tmp_path / "saved"), "key_file": str(key)}}

    monkeypatch.setenv("PACELINE_SEED", "3")
    rows = torch.utils.data.TensorDataset(torch.ones(8, 1), torch.ones(8, 1))
    session = paceline.start(
        model=torch.nn.Linear(1, 1),
        optimizer=torch.optim.SGD,
        loss=torch.nn.functional.mse_loss,
        data=rows,
        **keyed(keys[0]),
    )
    for batch in session.batches(steps=1):
        session.step(batch)
    session.save()
    monkeypatch.delenv("PACELINE_SEED")
    seeds = [saved_settings.resolve({**keyed(key), "resume": "auto"}, None, 1, 0).settings.seed for key in keys]
    assert seeds == [3, Settings().seed]
