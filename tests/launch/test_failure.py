import json
import signal
from pathlib import Path

import pytest

from paceline.launch.base import Launch
from paceline.launch.failure import Diagnosis, diagnose, explain, name_ranks
from paceline.launch.local import Ended, Outcome


class Scene:
    """A run that has ended, told rank by rank."""

    def __init__(self, run: Path) -> None:
        self._ended: list[Ended] = []
        self._launch = Launch(Path("train.py"), (), 0, run, {})
        (run / "errors").mkdir()
        (run / "output").mkdir()

    def ends(self, rank: int, code: int, time: float = 0.0, stopped: bool = False, output: str = "") -> "Scene":
        self._ended.append(Ended(rank, code, time, stopped))
        self._launch.output(rank).write_text(output)
        return self

    def reports(self, rank: int, kind: str, message: str, time: float = 0.0, consequence: bool = False) -> "Scene":
        report = {
            "type": kind,
            "message": message,
            "time": time,
            "consequence": consequence,
            "traceback": "TRACE",
        }
        self._launch.error(rank).write_text(json.dumps(report))
        return self.ends(rank, 5 if consequence else 1, time)

    def diagnosis(self) -> Diagnosis:
        found = diagnose(self._launch, Outcome(tuple(self._ended), None, 1.0))
        assert found is not None
        return found

    def lines(self) -> list[str]:
        return explain(self.diagnosis(), len(self._ended))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_the_cause_comes_first_and_the_consequences_in_one_line(scene: Scene) -> None:
    scene.reports(0, "WorkerLost", "rank 1 went away", 1.0, consequence=True)
    scene.reports(1, "NonFiniteLoss", "step 3: the loss is NaN", 2.0)
    scene.ends(2, -signal.SIGTERM, 3.0, stopped=True)
    assert scene.lines() == ["rank 1: step 3: the loss is NaN", "ranks 0, 2 stopped because they lost rank 1"]


def test_an_error_of_the_script_comes_with_its_traceback(scene: Scene) -> None:
    scene.reports(0, "ValueError", "bad", 1.0).ends(1, -9, 2.0, stopped=True)
    assert scene.lines() == ["rank 0: ValueError: bad", "TRACE", "rank 1 stopped because it lost rank 0"]


def test_the_earliest_cause_wins_and_the_others_are_named(scene: Scene) -> None:
    scene.reports(0, "ValueError", "late", 2.0).reports(1, "KeyError", "early", 1.0)
    assert scene.lines() == ["rank 1: KeyError: early", "TRACE", "rank 0 failed too: ValueError: late"]


def test_one_message_for_all(scene: Scene) -> None:
    for rank in range(4):
        scene.reports(rank, "InputError", "the data set is empty", float(rank))
    assert scene.lines() == ["all 4 workers: the data set is empty"]


def test_a_signal_is_a_cause(scene: Scene) -> None:
    scene.reports(0, "WorkerLost", "rank 1 went away", 0.5, consequence=True).ends(1, -signal.SIGKILL, 1.0)
    assert scene.lines()[0].startswith("rank 1: was ended by signal 9 (SIGKILL)")
    assert scene.diagnosis().cause.exit_code == 137


def test_a_death_without_report_shows_the_last_lines(scene: Scene) -> None:
    scene.ends(0, 0).ends(1, 3, output="".join(f"line {number}\n" for number in range(40)))
    lines = scene.lines()
    assert lines[0] == "rank 1: ended with exit code 3"
    assert lines[2:] == [f"line {number}" for number in range(10, 40)]


def test_rank_0_speaks_for_all_who_printed_the_same(scene: Scene) -> None:
    scene.ends(1, 2, 1.0, output="usage: train.py\n").ends(0, 2, 2.0, output="usage: train.py\n")
    assert scene.lines() == ["all 2 workers: ended with exit code 2"]


def test_equal_exit_codes_are_not_equal_reasons(scene: Scene) -> None:
    scene.ends(0, 1, 2.0, output="ConnectionError: closed").ends(1, 1, 1.0, output="ValueError: bad")
    lines = scene.lines()
    assert lines[0] == "rank 1: ended with exit code 1"
    assert "ValueError: bad" in lines


def test_a_worker_that_left_early_is_the_cause(scene: Scene) -> None:
    scene.ends(1, 0, 1.0).reports(0, "WorkerLost", "rank 1 went away", 2.0, consequence=True)
    assert scene.lines()[0] == "rank 1: its script ended while the other workers were still training"
    assert scene.diagnosis().cause.exit_code == 5


def test_only_consequences_show_the_first(scene: Scene) -> None:
    for rank in (0, 1):
        scene.reports(rank, "WorkerLost", f"{1 - rank} is silent", float(rank), consequence=True)
    assert scene.lines() == ["rank 0: 1 is silent", "rank 1 stopped after that"]


def test_a_taken_port_gets_advice(scene: Scene) -> None:
    scene.reports(0, "StartError", "EADDRINUSE")
    assert "--port" in scene.lines()[0]


def test_a_damaged_report_is_no_report(scene: Scene, tmp_path: Path) -> None:
    scene.ends(0, 1)
    (tmp_path / "errors" / "rank-0.json").write_text("{")
    assert scene.lines() == ["rank 0: ended with exit code 1"]


def test_no_failure_no_diagnosis(tmp_path: Path) -> None:
    launch = Launch(Path("train.py"), (), 1, tmp_path, {})
    assert diagnose(launch, Outcome((Ended(0, 0, 1.0, False),), None, 1.0)) is None


@pytest.mark.parametrize(("ranks", "name"), [((1,), "rank 1"), ((2, 0), "ranks 0, 2"), ((0, 1, 2), "all 3 workers")])
def test_names_of_ranks(ranks: tuple[int, ...], name: str) -> None:
    assert name_ranks(ranks, 3) == name
