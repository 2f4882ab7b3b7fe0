import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.coordinator.failure.coordinator_report import CoordinatorReport, LastSeen, LostWorker
from paceline.coordinator.failure.message import Context, details, lost_in_words, record, short
from paceline.coordinator.failure.root_cause import Failure, diagnose
from paceline.errors import name_ranks
from paceline.launchers.base import Launch, RunResult, WorkerExit

BOTH = {0: 0, 1: 1}


class Scenario:
    """A run that has ended, told rank by rank."""

    def __init__(self, run: Path) -> None:
        self.ended: list[WorkerExit] = []
        self._launch = Launch(Path("train.py"), (), 0, run, {})
        (run / "errors").mkdir()
        (run / "output").mkdir()

    def ends(self, rank: int, code: int, time: float = 0.0, output: str = "", **more: Any) -> "Scenario":
        self.ended.append(WorkerExit(rank, code, time, more.pop("stopped", False), **more))
        self._launch.output(rank).write_text(output)
        return self

    def reports(self, rank: int, kind: str, message: str, time: float = 0.0, consequence: bool = False) -> "Scenario":
        report = {
            "type": kind,
            "message": message,
            "line": "train.py:41",
            "time": time,
            "consequence": consequence,
            "traceback": "TRACE",
        }
        self._launch.error(rank).write_text(json.dumps(report))
        return self.ends(rank, 5 if consequence else 1, time)

    def failure(self, coordinator: CoordinatorReport | None = None, number: int | None = None) -> Failure:
        found = diagnose(self._launch, RunResult(tuple(self.ended), number, 1.0), coordinator)
        assert found is not None
        return found

    def context(self, coordinator: CoordinatorReport | None = None) -> Context:
        return Context(
            len(self.ended), "runs/a/output", "runs/a/failure.txt", None, "", coordinator or CoordinatorReport()
        )

    def lines(self, coordinator: CoordinatorReport | None = None, number: int | None = None) -> list[str]:
        failure = self.failure(coordinator, number)
        lines = short(failure, self.context(coordinator))
        assert len(lines) <= 10
        return lines + details(failure)

    def record(self, coordinator: CoordinatorReport | None = None) -> Mapping[str, Any]:
        return record(self.failure(coordinator), self.context(coordinator))


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    return Scenario(tmp_path)


def test_the_cause_comes_first_and_the_consequences_in_one_line(scenario: Scenario) -> None:
    scenario.reports(0, "WorkerLost", "rank 1 went away", 1.0, consequence=True)
    scenario.reports(1, "NonFiniteLoss", "step 3: the loss is NaN", 2.0)
    scenario.ends(2, -signal.SIGTERM, 3.0, stopped=True)
    lines = scenario.lines()
    assert lines[0] == "rank 1: step 3: the loss is NaN (train.py:41)"
    assert "ranks 0, 2 stopped because they lost rank 1; what they report follows from that" in lines
    assert [one["rank"] for one in scenario.record()["consequences"]] == [0, 2]


def test_an_error_of_the_script_comes_with_its_traceback_at_the_end(scenario: Scenario) -> None:
    lines = scenario.reports(0, "ValueError", "bad", 1.0).ends(1, -9, 2.0, stopped=True).lines()
    assert (lines[0], lines[-1]) == ("rank 0: ValueError: bad (train.py:41)", "TRACE")
    assert "fix: look at train.py:41; the traceback is at the end" in lines


def test_the_earliest_cause_wins_and_the_others_are_named(scenario: Scenario) -> None:
    scenario.reports(0, "ValueError", "late", 2.0).reports(1, "KeyError", "early", 1.0)
    lines = scenario.lines()
    assert lines[0] == "rank 1: KeyError: early (train.py:41)"
    assert "rank 0 failed too: ValueError: late" in lines


def test_one_message_for_all(scenario: Scenario) -> None:
    for rank in range(4):
        scenario.reports(rank, "InputError", "the data set is empty", float(rank))
    assert scenario.lines()[0] == "all 4 workers: the data set is empty (train.py:41)"
    assert (scenario.failure().code, scenario.failure().kind) == (2, "input")


def test_messages_that_differ_in_numbers_are_one(scenario: Scenario) -> None:
    for rank, (index, shape) in enumerate([("17", "[4, 3]"), ("0x7f3a", "[4]"), ("-1.5e-3", "[1, 2, 3]")]):
        scenario.reports(rank, "IndexError", f"sample {index} at step {rank + 3} has the shape {shape}", float(rank))
    lines = scenario.lines()
    assert lines[0] == "all 3 workers: IndexError: sample 17 at step 3 has the shape [4, 3] (train.py:41)"
    assert lines[1].startswith("who: worker 0, ")
    assert lines[1].endswith("; the message of the others differs in numbers only")
    assert not any("failed too" in line for line in lines)


def test_messages_that_differ_in_words_are_not(scenario: Scenario) -> None:
    scenario.reports(0, "ValueError", "no file a1", 1.0).reports(1, "ValueError", "no file b1", 2.0)
    scenario.reports(2, "KeyError", "no file a1", 3.0)
    lines = scenario.lines()
    assert "rank 1 failed too: ValueError: no file b1 (and 1 more)" in lines and "differs" not in lines[1]


def test_a_connection_that_was_closed_is_no_cause(scenario: Scenario) -> None:
    scenario.reports(0, "RuntimeError", "[gloo] Connection closed by peer [127.0.0.1]", 0.5).ends(1, -9, 1.0)
    assert scenario.lines()[0] == "rank 1: was killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    "why",
    ["has left: its process ended.", "has called shutdown.", "has ended by ValueError: bad.", "has failed: Rank 1: x"],
)
def test_an_operation_of_horovod_that_lost_a_rank_is_no_cause(scenario: Scenario, why: str) -> None:
    scenario.reports(0, "HorovodInternalError", f"allreduce 'x': rank 1 {why}", 0.5).reports(
        1, "ValueError", "bad", 1.0
    )
    assert scenario.lines()[0] == "rank 1: ValueError: bad (train.py:41)"


def test_an_error_of_the_script_that_sounds_like_a_lost_rank_is_a_cause(scenario: Scenario) -> None:
    scenario.reports(0, "ValueError", "the search has ended by chance", 0.5).reports(1, "ValueError", "bad", 1.0)
    assert scenario.lines()[0] == "rank 0: ValueError: the search has ended by chance (train.py:41)"


def test_a_closed_connection_alone_is_the_cause(scenario: Scenario) -> None:
    scenario.reports(0, "RuntimeError", "Connection closed by peer", 0.5).reports(1, "RuntimeError", "broken pipe", 1.0)
    assert scenario.lines()[0] == "rank 0: RuntimeError: Connection closed by peer (train.py:41)"


@pytest.mark.parametrize(
    ("number", "code", "kind"), [(signal.SIGKILL, 5, "killed"), (signal.SIGSEGV, 139, "crashed")], ids=str
)
def test_a_signal_is_a_cause(scenario: Scenario, number: signal.Signals, code: int, kind: str) -> None:
    scenario.reports(0, "WorkerLost", "rank 1 went away", 0.5, consequence=True).ends(1, -number, 1.0, pid=42)
    assert scenario.lines()[0] == f"rank 1: was killed by signal {number.value} ({number.name})"
    told = scenario.record()
    assert (told["code"], told["kind"], told["signal"], told["pid"]) == (code, kind, number, 42)
    assert told["exit_code"] is None


def test_the_kernel_ended_it_for_lack_of_memory(scenario: Scenario) -> None:
    scenario.ends(0, 5, 2.0, stopped=True).ends(1, -9, 1.0, out_of_memory=True)
    assert scenario.lines()[0] == "rank 1: ran out of memory (the kernel ended it)"
    assert scenario.record()["kind"] == "out-of-memory"


def test_the_kernel_ended_a_data_loader(scenario: Scenario) -> None:
    scenario.reports(0, "RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.")
    scenario.ended[0] = WorkerExit(0, 1, 1.0, False, out_of_memory=True)
    assert scenario.lines()[0].startswith(
        "rank 0: a process of its data loader ran out of memory (the kernel ended it): "
    )


@pytest.mark.parametrize(
    ("kind", "message", "says"),
    [
        ("MemoryError", "", "ran out of memory: MemoryError"),
        ("OutOfMemoryError", "CUDA out of memory.", "ran out of GPU memory: OutOfMemoryError: CUDA out of memory."),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried", "ran out of memory: RuntimeError"),
    ],
)
def test_memory_by_exception(scenario: Scenario, kind: str, message: str, says: str) -> None:
    scenario.reports(0, kind, message)
    assert scenario.lines()[0].startswith(f"rank 0: {says}")
    assert (scenario.record()["kind"], scenario.record()["code"]) == ("out-of-memory", 1)


def test_a_death_without_report_shows_the_last_lines_at_the_end(scenario: Scenario) -> None:
    scenario.ends(0, 0).ends(1, 3, output="".join(f"line {number}\n" for number in range(40)))
    lines = scenario.lines()
    assert lines[0] == "rank 1: ended with exit code 3"
    assert lines[-30:] == [f"line {number}" for number in range(10, 40)]


def test_rank_0_speaks_for_all_who_printed_the_same(scenario: Scenario) -> None:
    scenario.ends(1, 2, 1.0, "usage: train.py\n").ends(0, 2, 2.0, "usage: train.py\n")
    assert scenario.lines()[0] == "all 2 workers: ended with exit code 2"
    assert details(scenario.failure()) == []


TRACE = """\
something before
Traceback (most recent call last):
  File "/home/me/train.py", line 7, in <module>
    read()
  File "/home/me/reader.py", line 3, in read
    raise ValueError("bad")
ValueError: bad
"""


def test_an_exception_that_was_only_printed_is_found(scenario: Scenario) -> None:
    scenario.ends(0, 5, 2.0, stopped=True).ends(1, 1, 1.0, TRACE + "[W123] destroy_process_group was not called\n")
    lines = scenario.lines()
    assert (lines[0], lines[-1]) == ("rank 1: ValueError: bad (reader.py:3)", "ValueError: bad")
    assert scenario.record()["exception"] == {"type": "ValueError", "message": "bad", "line": "reader.py:3"}


def test_a_syntax_error_is_found(scenario: Scenario) -> None:
    scenario.ends(0, 1, 1.0, '  File "/home/me/train.py", line 3\n    if\n      ^\nSyntaxError: invalid syntax\n')
    lines = scenario.lines()
    assert (lines[0], lines[-1]) == (
        "rank 0: SyntaxError: invalid syntax (train.py:3)",
        "SyntaxError: invalid syntax",
    )


def test_equal_exit_codes_are_not_equal_reasons(scenario: Scenario) -> None:
    scenario.ends(0, 1, 2.0, "ConnectionError: closed").ends(1, 1, 1.0, "ValueError: bad")
    lines = scenario.lines()
    assert lines[0] == "rank 1: ended with exit code 1"
    assert lines[-1] == "ValueError: bad"


def test_an_error_in_a_data_loader_is_told_by_its_own_name(scenario: Scenario) -> None:
    text = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n ...\n"
    scenario.reports(0, "KeyError", f"{text}KeyError: 'image 7'\nThe data set was asked for sample 7.\n\n")
    assert scenario.lines()[0] == "rank 0: KeyError: 'image 7' (train.py:41)"


def test_a_worker_that_left_early_is_the_cause(scenario: Scenario) -> None:
    scenario.ends(1, 0, 1.0).reports(0, "WorkerLost", "rank 1 went away", 2.0, consequence=True)
    assert scenario.lines()[0] == "rank 1: the script ended while the other workers were still training"
    assert (scenario.failure().code, scenario.failure().kind) == (1, "ended-early")


def test_only_consequences_show_the_first(scenario: Scenario) -> None:
    for rank in (0, 1):
        scenario.reports(rank, "WorkerLost", f"{1 - rank} is silent", float(rank), consequence=True)
    lines = scenario.lines()
    assert lines[0] == "rank 0: 1 is silent (train.py:41)"
    assert "rank 1 stopped after that" in lines


def test_a_taken_port_gets_advice(scenario: Scenario) -> None:
    scenario.reports(0, "StartError", "EADDRINUSE")
    assert "another process listens on this port" in scenario.lines()[1]
    assert "--port" in scenario.lines()[1]


def test_a_damaged_report_is_no_report(scenario: Scenario, tmp_path: Path) -> None:
    scenario.ends(0, 1)
    (tmp_path / "errors" / "rank-0.json").write_text("{")
    assert scenario.lines()[0] == "rank 0: ended with exit code 1"


def test_no_failure_no_diagnosis(tmp_path: Path) -> None:
    launch = Launch(Path("train.py"), (), 1, tmp_path, {})
    assert diagnose(launch, RunResult((WorkerExit(0, 0, 1.0, False),), None, 1.0)) is None


def test_a_worker_that_was_replaced_is_no_failure(scenario: Scenario, tmp_path: Path) -> None:
    lost = (LostWorker(1, 1, 1.0),)
    coordinator = CoordinatorReport(code=0, elastic=True, ranks={0: 0, 2: 1}, lost=lost, joined=1)
    result = RunResult(
        (WorkerExit(0, 0, 9.0, False), WorkerExit(1, -9, 1.0, False), WorkerExit(2, 0, 9.0, False)), None, 9.0
    )
    assert diagnose(Launch(Path("train.py"), (), 2, tmp_path, {}), result, coordinator) is None
    assert lost_in_words(coordinator) == "1 worker was lost on the way; 1 was replaced"


def test_who_was_killed_before_it_had_joined_is_no_consequence(scenario: Scenario) -> None:
    scenario.ends(2, -9, 1.0, tolerated=True)
    scenario.reports(0, "ValueError", "bad", 5.0).reports(1, "WorkerLost", "lost rank 0", 5.1, consequence=True)
    scenario.ends(3, -9, 5.2, tolerated=True)
    lines = scenario.lines(CoordinatorReport(elastic=True, ranks=BOTH))
    assert "rank 1 and worker 3 stopped because they lost rank 0; what they report follows from that" in lines


def test_who_failed_after_the_last_step_decides_the_exit_code(scenario: Scenario) -> None:
    scenario.ends(0, 3, 1.0).ends(1, 3, 1.0)
    assert scenario.failure(CoordinatorReport(code=0, ranks=BOTH)).code == 3


def test_a_hang(scenario: Scenario) -> None:
    scenario.reports(0, "WorkerLost", "rank 1 is late", 2.0, consequence=True).ends(1, -9, 3.0, stopped=True, pid=7)
    late = LastSeen(41, "in the data loader", "train.py:8", (0,), 12.0, "in the all-reduce of bucket 2")
    coordinator = CoordinatorReport(
        124, "rank 0 has waited 12 s", "hang", (1,), ranks=BOTH, processes={1: (7, "a")}, last_seen={1: late}
    )
    lines = scenario.lines(coordinator)
    assert lines[:3] == [
        "a hang: rank 0 has waited 12 s",
        "who: worker 1, process 7 on a",
        "when: at step 41, last heard in the data loader (train.py:8)",
    ]
    told = scenario.record(coordinator)
    assert (told["code"], told["kind"], told["step"], told["line"]) == (124, "hang", 41, "train.py:8")
    assert told["waited"] == {"seconds": 12.0, "ranks": [0]}
    assert told["operation"] == "in the data loader"


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGTERM, 75, "preempted by SIGTERM at step 109"),
        (signal.SIGUSR1, 75, "preempted by SIGUSR1 at step 109"),
        (None, 75, "preempted at step 109: rank 1 was asked to end"),
        (signal.SIGINT, 130, "stopped by SIGINT"),
    ],
    ids=str,
)
def test_preemption(scenario: Scenario, number: int | None, code: int, says: str) -> None:
    scenario.ends(0, 75, 1.0, stopped=True).ends(1, 75, 1.0, stopped=True)
    coordinator = CoordinatorReport(75, "preempted", ranks=BOTH, step=109, leaving=(1,))
    assert scenario.lines(coordinator, number)[0] == says
    assert scenario.failure(coordinator, number).code == code


@pytest.mark.parametrize("killed", [1, 2])  # a member, a standby
def test_who_was_killed_is_no_cause_of_a_preemption(scenario: Scenario, killed: int) -> None:
    scenario.ends(0, 75, 2.0).ends(3 - killed, 75, 2.0).ends(killed, -9, 1.0)
    coordinator = CoordinatorReport(75, "preempted", elastic=True, ranks=BOTH, step=109, leaving=(0,))
    assert scenario.lines(coordinator)[0] == "preempted at step 109: rank 0 was asked to end"
    assert scenario.failure(coordinator).code == 75


def test_a_failure_before_the_workers_met_is_a_cause(scenario: Scenario) -> None:
    scenario.ends(0, -6, 1.0).ends(
        1, 1, 2.0, "Traceback (most recent call last):\nRuntimeError: Connection reset by peer\n"
    )
    failure = scenario.failure(CoordinatorReport(5, "worker 0 was killed", lost=(LostWorker(0, None, 1.0),)))
    assert (failure.workers, failure.kind) == ((0,), "crashed")


def test_a_signal_that_no_worker_heeds_is_no_preemption(scenario: Scenario) -> None:
    scenario.ends(0, -9, 1.0, stopped=True)
    assert (scenario.lines(number=15)[0], scenario.failure(number=15).code) == ("stopped by SIGTERM", 143)


def test_a_worker_of_another_machine(scenario: Scenario) -> None:
    said = {"type": "ValueError", "message": "bad", "line": "a.py:1", "time": 1.0, "consequence": False, "host": "far"}
    ended = (WorkerExit(1000, 1, 2.0, False),)
    scenario.reports(0, "WorkerLost", "rank 1 failed", 2.0, consequence=True)
    lines = scenario.lines(CoordinatorReport(1, "", ranks={0: 0, 1000: 1}, reports={1000: said}, exits=ended))
    assert lines[0] == "rank 1: ValueError: bad (a.py:1)"
    assert lines[1].endswith("on far")


KEYS = {
    *("kind", "code", "message", "rank", "ranks", "worker", "host", "pid", "signal", "exit_code", "exception"),
    *("traceback", "known_error", "step", "operation", "line", "waited", "done", "checkpoint", "resume", "others"),
    *("consequences", "time"),
}


def test_the_keys_of_the_record_stay(scenario: Scenario) -> None:
    told = scenario.ends(1, 3).record()
    assert set(told) == KEYS
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize(("ranks", "name"), [((1,), "rank 1"), ((2, 0), "ranks 0, 2"), ((0, 1, 2), "all 3 workers")])
def test_names_of_ranks(ranks: tuple[int, ...], name: str) -> None:
    assert name_ranks(ranks, 3) == name
