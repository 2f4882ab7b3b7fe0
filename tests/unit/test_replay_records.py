"""What a run directory tells for a replay, and where two runs begin to differ by their records."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from event_files import mark

from paceline.diagnostics.replay.parting import first_of, first_recorded
from paceline.diagnostics.replay.recorded import load
from paceline.errors import ConfigError, InputError
from paceline.system.installed import version

LOSSES = (0.9, 0.8, 0.7, 0.6, 0.5)


def a_run(folder: Path, losses: Sequence[float] = LOSSES, session: int = 1, **launch: Any) -> Path:
    """Two workers, whose chain is the losses so far."""
    script = folder / "train.py"
    folder.mkdir()
    script.write_text("train()\n")
    known = {"script": str(script), "arguments": [], "settings": {}, "versions": {"paceline": version("paceline")}}
    (folder / "launch.json").write_text(json.dumps(known | launch))
    for rank in range(2):
        code = {"train.py": "6fc2f36be1037fdf"}
        mark(folder, rank, "start", 0.0, workers=2, strategy="allreduce", same_bits=True, session=session, code=code)
        for step, loss in enumerate(losses):
            chain = "".join(f"{one:.1f}" for one in losses[: step + 1])
            fields = {"step": step, "loss": loss, "gradient_norm": 2.0, "chain": chain}
            mark(folder, rank, "step", step + 1.0, **fields, **({"tensor": "w", "digest": "1"} if rank else {}))
    return folder


def test_the_last_record_of_a_step_counts(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    mark(run, 0, "recovered", 8.0, 1, step=2, workers=[0])
    mark(run, 0, "step", 9.0, 1, step=2, loss=float("nan"), gradient_norm=1.0, chain="new")
    with (run / "events" / "rank-1.jsonl").open("a") as file:
        file.write('{"time": 1.0, "event": "step", "ra')
    known = load(run)
    assert (known.steps[2].chain, known.steps[2].is_finite, known.workers_at(2)) == ("new", False, 1)
    assert (known.steps[3].digests, known.workers_at(3)) == ({"w": "1"}, 2)


def test_the_nearest_checkpoint_that_is_still_there(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    for step in (2, 4):
        (run / f"checkpoints/step-{step:06d}/save").mkdir(parents=True)
    (run / "checkpoints/step-000002/save/manifest.json").touch()  # that of step 4 is not complete
    mark(run, 0, "checkpoint", 3.0, step=3, path=str(run / "gone"))
    known = load(run)
    assert [known.checkpoint_before(step)[0] for step in range(5)] == [0, 0, 2, 2, 2]


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"versions": {"paceline": "999.1.0"}}, "999.1.0, which is newer"),
        ({"arguments": ["--token", "***"]}, "was a secret"),
        ({"script": 3}, "does not say which script"),
        ({"versions": None}, "cannot be read"),
        ({"session": 2}, "several times"),
    ],
)
def test_runs_that_cannot_be_replayed(tmp_path: Path, launch: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, InputError), match=message):
        load(a_run(tmp_path / "one", **launch))


def test_steps_that_cannot_be_replayed(tmp_path: Path) -> None:
    known = load(a_run(tmp_path / "one"))
    known.check(5)  # has failed, perhaps
    for step in (-1, 6):
        with pytest.raises(ConfigError, match="has the steps 0 to 4"):
            known.check(step)
    known.script.write_text("train(faster=True)\n")
    with pytest.raises(ConfigError, match="is not the file with which one was trained"):
        known.check(3)


def test_a_run_without_digests(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one", losses=[])
    mark(run, 0, "step", 1.0, step=0, loss=0.5, gradient_norm=1.0)
    with pytest.raises(InputError, match="have no digests"):
        load(run)


def test_where_the_records_of_two_runs_part(tmp_path: Path) -> None:
    one, two = load(a_run(tmp_path / "one")), load(a_run(tmp_path / "two", losses=[0.9, 0.8, 0.3, 0.6]))
    assert first_recorded(one, one) is None
    assert first_recorded(one, two) == 2
    assert one.steps[2].difference(two.steps[2]) == "the loss, 0.7 and 0.3"
    assert one.steps[3].difference(two.steps[3]).startswith("the chain")


def test_the_settings_are_those_of_the_launch_that_took_the_step(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one", losses=LOSSES[:3])
    mark(run, 0, "start", 9.0, same_bits=True, settings={"strategy": "stealing", "tracking.url": "http://***@host"})
    mark(run, 0, "step", 10.0, 1, step=3, loss=0.6, gradient_norm=2.0, chain="new")
    known = load(run)
    assert known.settings_of(2) == {}
    with pytest.raises(ConfigError, match="was a secret"):
        known.settings_of(3)


def test_the_formats_of_a_step_are_those_that_the_run_had_chosen(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one", losses=LOSSES[:3])
    mark(run, 0, "communication", 0.5, step=0, formats="0=float32", chooses=True)
    mark(run, 0, "communication", 9.0, step=3, formats="0=float32,3=int8", chooses=True)
    mark(run, 0, "step", 10.0, 1, step=3, loss=0.6, gradient_norm=2.0, chain="new")
    assert load(run).settings_of(2) == {"communication": "0=float32"}
    assert load(run).settings_of(3) == {"communication": "0=float32,3=int8"}


@pytest.mark.parametrize("first", range(8))
def test_bisection(first: int) -> None:
    asked: list[int] = []
    assert first_of(-1, 7, lambda step: bool(asked.append(step)) or step >= first) == first
    assert len(asked) == len(set(asked)) <= 5
