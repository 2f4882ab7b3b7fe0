"""Records that are missing, damaged, of another run or of another version: said, and never drawn."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import event_files as files
import pytest
from event_files import TWO, UNEVEN, change

from paceline.errors import ConfigError, InputError
from paceline.observe.timeline.comparison import compare
from paceline.schedule.pipeline.clock import simulate
from paceline.schedule.pipeline.synchronous import one_forward_one_backward


def test_a_run_without_events(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no record"):
        compare(tmp_path)


def test_a_run_of_another_strategy(tmp_path: Path) -> None:
    files.mark(tmp_path, 0, "start", 0.0, strategy="allreduce", workers=2)
    files.mark_step(tmp_path, 2, 0, 1.0)
    with pytest.raises(InputError, match="trained with strategy 'allreduce' on 2 workers"):
        compare(tmp_path)


def test_a_run_that_ended_in_its_first_step(tmp_path: Path) -> None:
    files.mark(tmp_path, 0, "start", 0.0, strategy="pipeline", workers=2)
    files.mark_cut(tmp_path, TWO)
    with pytest.raises(InputError, match="no step that all workers finished"):
        compare(tmp_path)


def test_records_of_another_version(tmp_path: Path) -> None:
    files.mark(tmp_path, 0, "cut", 0.0, stages=TWO)
    files.mark_step(tmp_path, 2, 0, 1.0)
    with pytest.raises(InputError, match=r"another version .* resume=auto"):
        compare(tmp_path)


def test_records_of_another_version_before_a_resume(run: Path) -> None:
    """What was done with the unknown cut is not drawn, nor taken for what came before it."""
    files.mark(run, 0, "cut", 1000.0, stages=TWO)
    files.mark_whole(run, simulate(one_forward_one_backward(2, 3), UNEVEN), 5, 1100.0, 3)
    assert compare(run).step == 4
    with pytest.raises(ConfigError, match=r"--step 5: .* 0 to 4\."):
        compare(run, 5)
    files.mark_cut(run, TWO, 2000.0)
    files.mark_whole(run, simulate(one_forward_one_backward(2, 3), UNEVEN), 6, 2100.0, 3)
    assert (compare(run).step, compare(run, 6).step) == (6, 6)
    with pytest.raises(ConfigError, match=r"--step 5: .* 0 to 4, 6\."):
        compare(run, 5)


def test_the_file_of_the_first_rank_is_on_another_machine(run: Path) -> None:
    (run / "events" / "rank-0.jsonl").unlink()
    files.mark(run, 1, "start", 2.0, strategy="pipeline", workers=2)
    with pytest.raises(InputError, match=r"rank-0\.jsonl is missing.* collect the event files of all machines"):
        compare(run)
    files.mark(run, 0, "start", 0.0, strategy="pipeline", workers=2)
    with pytest.raises(InputError, match=r"has not cut its model yet"):
        compare(run)


def test_records_that_are_lost(run: Path) -> None:
    """A full disk loses records; the last ones may be there."""
    files.mark_step(run, 2, 5, 1000.0)
    with pytest.raises(ConfigError, match=r"--step 5: records .* missing\. Steps that can be drawn: 0 to 4\."):
        compare(run, 5)
    assert compare(run).step == 3


LOSSES: dict[str, Callable[[Any], Any]] = {
    "lost": lambda record: None,
    "no seconds": lambda record: {key: value for key, value in record.items() if key != "seconds"},
    "no number": lambda record: {**record, "seconds": "long"},
    "no time": lambda record: {**record, "time": None},
    "no such number": lambda record: {**record, "time": 10**400},
    "a stage of none": lambda record: {**record, "stage": None},
    "another stage": lambda record: {**record, "stage": 7},
    "too many microbatches": lambda record: {**record, "microbatch": 10**12},
}


@pytest.mark.parametrize("kind", ["forward", "backward", "send"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_with_a_hole_is_not_drawn(run: Path, kind: str, loss: str) -> None:
    change(run, 0, {"event": kind, "step": 4, "microbatch": 1}, LOSSES[loss])
    with pytest.raises(ConfigError, match=r"--step 4: records .* missing\. Steps that can be drawn: 0 to 3\."):
        compare(run, 4)
    assert compare(run).step == 3
    assert compare(run, 2).measured.seconds > 0


def test_the_end_of_a_step_that_tells_nothing(run: Path) -> None:
    for step, loss in ((3, "no seconds"), (4, "no time")):
        change(run, 1, {"event": "step", "step": step}, LOSSES[loss])
    with pytest.raises(ConfigError, match=r"--step 4: .*0 to 2\."):
        compare(run, 4)


def test_all_steps_have_holes(run: Path) -> None:
    change(run, 0, {"event": "forward", "microbatch": 0}, LOSSES["lost"])
    for step in (None, 4):
        with pytest.raises(InputError, match=r"No step of .* records of operations"):
            compare(run, step)


def test_operations_that_were_done_twice(run: Path) -> None:
    """As they would be if a step was repeated by the same workers."""
    files.mark_timeline(run, simulate(one_forward_one_backward(2, 3), UNEVEN), 800.0, 4, 3)
    assert compare(run).step == 3


@pytest.mark.parametrize(("kind", "left"), [("forward", "0 to 3"), ("backward", "0 to 4, 8")])
def test_a_hole_in_a_pipeline_that_never_runs_empty(stream: Path, kind: str, left: str) -> None:
    """The steps that may overlap with it are not drawn either."""
    change(stream, 0, {"event": kind, "step": 5, "microbatch": 0}, LOSSES["lost"])
    with pytest.raises(ConfigError, match=f"can be drawn: {left}"):
        compare(stream, 6)


def test_garbage_without_a_cut(tmp_path: Path) -> None:
    files.mark(tmp_path, 0, "start", 0.0)
    with pytest.raises(InputError, match="without stages"):
        compare(tmp_path)


def test_times_that_are_not_numbers_pass_through(run: Path) -> None:
    files.mark(run, 0, "step", 5000.0, step=9, seconds=1.0, loss=math.nan)
    assert compare(run, 1).step == 1
