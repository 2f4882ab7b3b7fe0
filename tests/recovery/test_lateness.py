"""When the coordinator reports late workers, drops them or ends the run: on the clock of the test."""

import platform
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_membership import ScriptedMembership

from paceline.coordinator import monitor
from paceline.coordinator.failure.coordinator_report import LastSeen, LostWorker
from paceline.coordinator.hang_detection import WorkerStatus
from paceline.coordinator.lateness import LatenessPolicy
from paceline.coordinator.monitor import Alert, RunMonitor, last_seen_of
from paceline.errors import DEADLINE_PASSED, StartError, WorkerLost

LOADS = WorkerStatus(0, 7, "in the data loader", waiting=False, since=0.0, line="train.py:41", step_seconds=0.1)
WAITS = WorkerStatus(0, 7, "in the all-reduce of bucket 2", waiting=True, since=0.0, step_seconds=0.1)


class OneMachine(ScriptedMembership):
    """Workers of machine ``a``."""

    def about(self, number: int) -> dict[str, Any]:
        return {"host": "a"}


class Run:
    """Three workers that train, with a deadline of 5 s, and a timeout of 60 s."""

    def __init__(self, patch: pytest.MonkeyPatch, drops: bool, come: bool = True) -> None:
        patch.setattr(monitor, "time", SimpleNamespace(time=lambda: 1e9 + self.now))
        self.now = 0.0
        self.hand = OneMachine(drops=drops)
        self.of = self.hand.of
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.monitor = RunMonitor(lambda event, **fields: self.events.append((event, fields)), self.clock)
        self.monitor.hang_seconds, self.monitor.timeout_seconds = 5.0, 60.0
        self.policy = LatenessPolicy(self.of, self.monitor, self.clock)
        if come:
            self.hand.come(0, 1, 2)
            self.policy.reset()

    def clock(self) -> float:
        return self.now

    def check_at(self, now: float) -> None:
        self.now = self.hand.now = now
        self.policy.check(now)

    def hear(self, now: float, **statuses: WorkerStatus) -> None:
        """Each worker sends a heartbeat; ``late`` is worker 1."""
        self.now = now
        for number in range(3):
            waits = WorkerStatus(9, 7, WAITS.doing, waiting=True, since=now, step_seconds=0.1)
            self.policy.heartbeat(number, statuses.get("late", waits) if number == 1 else waits)

    @property
    def kinds(self) -> list[str]:
        return [alert.kind for alert in self.monitor.alerts]


Start = Callable[..., Run]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    return lambda drops=False, come=True: Run(monkeypatch, drops, come)


def loading(now: float) -> WorkerStatus:
    return WorkerStatus(9, 7, LOADS.doing, waiting=False, since=now, line=LOADS.line, step_seconds=0.1)


def test_late_workers_are_reported_and_again_after_the_deadline(start: Start) -> None:
    run = start()
    run.hear(5.0, late=loading(5.0))
    run.check_at(5.0)
    assert run.kinds == [] and run.monitor.late_workers == ()
    run.hear(6.0, late=loading(6.0))
    for now in (6.0, 10.9):
        run.check_at(now)
        assert run.kinds == ["late"] and run.monitor.late_workers == (1,)
        run.hear(10.9, late=loading(10.9))
    run.hear(11.0, late=loading(11.0))
    run.check_at(11.0)
    assert run.kinds == ["late", "late"]
    assert run.monitor.alerts[-1].workers == (1,)
    assert run.monitor.alerts[-1].text == (
        "still waiting: ranks 0, 2 have waited 11 s in the all-reduce of bucket 2 at step 7; "
        "rank 1 has been in the data loader at step 7 for 11 s, train.py:41"
    )
    assert run.events[-1] == ("hang-check", {"text": run.monitor.hang_report, "late": [1]})
    assert run.of.over is None and run.of.members == [0, 1, 2]
    run.hear(12.0, late=loading(0.1))
    run.check_at(12.0)
    assert run.monitor.late_workers == () and run.monitor.hang_report == ""


def test_late_workers_are_dropped_where_others_go_on(start: Start) -> None:
    run = start(drops=True)
    run.hear(6.0, late=loading(6.0))
    run.check_at(6.0)
    (lost,) = run.of.lost
    assert (lost.worker, lost.rank, lost.may_run) == (1, 1, True)
    assert lost.reason == f"rank 1 (process 1 on a) was late for more than 5 s: {run.monitor.hang_report}"
    assert run.of.over is None and run.of.changing and run.of.fenced


def test_the_run_ends_if_all_others_have_given_up_on_a_late_worker(start: Start) -> None:
    run = start()
    run.hear(6.0, late=loading(6.0))
    run.check_at(6.0)
    run.hand.ready(0)
    assert run.of.changing
    run.policy.forget(0)
    run.check_at(6.5)  # rank 2 still waits, but the change has begun
    assert run.of.over is not None
    assert (run.of.over["code"], run.of.over["kind"], run.of.over["workers"]) == (DEADLINE_PASSED, "hang", (1,))
    assert run.of.over["reason"] == run.monitor.hang_report and run.of.over["save"]
    assert run.of.workers[1].state == "gone"


def test_others_that_have_given_up_end_the_run_without_heartbeats(start: Start) -> None:
    run = start()
    run.hear(6.0, late=loading(6.0))
    run.check_at(6.0)
    run.policy.reset()
    run.hand.ready(0)
    run.check_at(6.0)
    assert run.of.over is None, "rank 2 has not given up"
    run.hand.ready(2)
    run.check_at(6.0)
    assert run.of.over is not None and run.of.over["kind"] == "hang"


def test_a_late_worker_that_comes_back_does_not_end_the_run(start: Start) -> None:
    run = start()
    run.hear(6.0, late=loading(6.0))
    run.check_at(6.0)
    run.policy.reset()
    for number in (0, 1, 2):
        run.hand.ready(number)
    run.check_at(6.0)
    assert run.of.over is None and run.of.generation == 1


def test_a_loss_is_the_reason_if_a_member_was_lost_meanwhile(start: Start) -> None:
    run = start()
    run.hear(6.0, late=loading(6.0))
    run.check_at(6.0)
    run.hand.lose(2)
    run.hand.ready(0)
    run.check_at(6.0)
    assert run.of.over is not None
    assert (run.of.over["code"], run.of.over["reason"]) == (WorkerLost.exit_code, "rank 2 was killed")


@pytest.mark.parametrize(("timeout", "limit"), [(4.0, 2.0), (10.0, 8.0), (60.0, 54.0)])
def test_late_workers_are_reported_two_heartbeats_before_the_others_give_up(
    start: Start, timeout: float, limit: float
) -> None:
    run = start()
    run.monitor.timeout_seconds = timeout
    run.monitor.hang_seconds = 600.0
    for now, kinds in (limit, []), (limit + 0.1, ["late"]):
        run.hear(now, late=loading(now))
        run.check_at(now)
        assert run.kinds == kinds


@pytest.mark.parametrize(("timeout", "limit"), [(60.0, 60.0), (None, 600.0)])
def test_members_that_do_not_come_back_are_lost(start: Start, timeout: float | None, limit: float) -> None:
    run = start(drops=True)
    run.monitor.timeout_seconds = timeout
    run.hand.ready(0, 2)
    run.check_at(limit - 0.1)
    assert not [lost for lost in run.of.lost if "did not come back" in lost.reason]
    run = start(drops=True)
    run.monitor.timeout_seconds = timeout
    run.hand.ready(0, 2)
    for number in range(3):
        run.policy.heartbeat(number, loading(0.0))
    run.check_at(limit)
    (lost,) = run.of.lost
    assert (
        lost.worker == 1
        and lost.may_run
        and lost.reason.endswith(f"did not come back to the others within {limit:.0f} s")
    )


def test_a_worker_without_a_heartbeat_is_silent_since_its_generation_formed(start: Start) -> None:
    run = start()
    run.now = 2.0
    run.hand.ready(0, 1, 2, steps=5)
    run.hand.of.advance(2.0)
    run.policy.reset()
    run.now = 3.0
    run.policy.heartbeat(2, loading(0.5))
    run.policy.heartbeat(0, loading(0.5))
    assert [(one.rank, one.silent) for one in run.policy.statuses(4.0)] == [(0, 1.0), (1, 2.0), (2, 1.0)]
    run.policy.forget(0)
    statuses = run.policy.statuses(7.0)
    assert [(one.rank, one.step, one.silent, one.since) for one in statuses] == [
        (0, 5, 5.0, 0.0),
        (1, 5, 5.0, 0.0),
        (2, 7, 4.0, 0.5),
    ]
    assert [one.doing for one in statuses] == ["re-forming", "re-forming", "in the data loader"]
    assert not any(one.waiting for one in statuses)
    assert [one.silent for one in run.policy.statuses(2.5)][2] == 0.0
    run.hand.ready(0)
    assert [one.rank for one in run.policy.statuses(7.0)] == [1, 2]


def test_a_worker_that_does_not_reach_start_is_named_and_then_ends_the_run(start: Start) -> None:
    run = start(come=False)
    run.monitor.started(1, 4242)
    for number in (0, 1, 2):
        run.of.started(number)
    run.check_at(1.0)
    assert run.kinds == []
    run.of.register(0, {"pid": 1, "host": "a"}, {})
    run.of.ready(0, None, 2.0)
    for now, count in ((2.0, 0), (6.9, 0), (7.0, 1), (11.9, 1), (12.0, 2)):
        run.check_at(now)
        assert run.kinds == ["absent"] * count
    assert run.monitor.alerts[0].workers == (1, 2)
    text = "rank 1 (process 4242), rank 2 have not reached paceline.start for 5 s; rank 0 has"
    assert run.monitor.alerts[0].text == f"still waiting: {text}"
    assert run.events[0] == ("absent", {"text": text, "workers": [1, 2]})
    run.of.register(2, {"pid": 3, "host": "a"}, {})
    run.check_at(17.0)
    assert run.monitor.alerts[-1].workers == (1,), "rank 2 has reached it"
    run.of.ready(2, None, 18.0)
    run.check_at(61.9)
    assert run.of.over is None
    run.check_at(62.0)
    assert run.of.over is not None
    assert (run.of.over["code"], run.of.over["kind"], run.of.over["workers"]) == (
        StartError.exit_code,
        "not-started",
        (1,),
    )
    assert run.of.over["reason"] == ("rank 1 (process 4242) has not reached paceline.start for 60 s; ranks 0, 2 have")
    report = run.monitor.report(run.of, [], elastic=False)
    assert report.last_seen == {1: LastSeen(None, "", "", (0, 2), 60.0)}


def test_many_names_are_cut(start: Start) -> None:
    run = start(come=False)
    run.monitor.timeout_seconds = None
    for number in range(11):
        run.of.started(number)
    run.of.register(0, {"pid": 1, "host": "a"}, {})
    run.of.ready(0, None, 0.0)
    run.monitor.hang_seconds = None
    for now in (0.0, 29.9):
        run.check_at(now)
        assert run.kinds == []
    run.check_at(700.0)
    assert "rank 7, rank 8 and 2 more have" in run.monitor.alerts[0].text
    assert run.of.over is None
    run.check_at(729.0)
    assert len(run.kinds) == 1
    run.check_at(730.0)
    assert len(run.kinds) == 2


def test_a_stopped_process_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    monkeypatch.setattr(monitor, "state_of", lambda pid: monitor.STOPPED if pid == 77 else "running")
    for number, pid in ((0, 76), (1, 77), (2, 78)):
        run.monitor.started(number, pid)
    run.hear(6.0, late=loading(6.0))
    run.check_at(6.0)
    assert run.monitor.hang_report.endswith("; stopped by a signal: process 77 of rank 1")
    assert (run.monitor.pid_of(1), run.monitor.pid_of(5)) == (77, 0)


def test_where_a_worker_was_last_seen() -> None:
    statuses = [
        WorkerStatus(0, 7, WAITS.doing, waiting=True, since=4.0, silent=1.0),
        WorkerStatus(1, 6, "computing", waiting=False, since=4.0, silent=3.0, line="train.py:3"),
        WorkerStatus(2, 7, "waiting", waiting=True, since=6.0, silent=0.5),
    ]
    assert last_seen_of(statuses, 1) == LastSeen(6, "computing", "train.py:3", (0, 2), 6.5, WAITS.doing)
    assert last_seen_of(statuses[::-1], 1).waiting == (0, 2)
    assert last_seen_of(statuses, 0) == LastSeen(7, WAITS.doing, "", (2,), 6.5, "waiting")
    assert last_seen_of(statuses, 4) == LastSeen(None, "", "", (0, 2), 6.5, WAITS.doing)
    silent = [*statuses[:1], WorkerStatus(1, 6, "computing", False, 4.0, silent=3.1), *statuses[2:]]
    assert last_seen_of(silent, 1) == LastSeen(7, "", "", (0, 2), 6.5, WAITS.doing)
    assert last_seen_of(statuses[1:2], 1) == LastSeen(6, "computing", "train.py:3")


def test_events_of_the_membership_become_alerts_and_the_report(start: Start) -> None:
    run = start()
    of, fields = run.monitor, {"reason": "rank 1 was killed"}
    run.now = 3.0
    statuses = [WorkerStatus(0, 8, "waiting", True, 2.0), WorkerStatus(1, 7, "computing", False, 2.0)]
    of.record("membership", statuses, generation=0, workers=[0, 1, 2], joined=[0, 1, 2])
    assert run.kinds == []
    of.record("lost", statuses, worker=5, rank_lost=None, **fields)
    of.record("lost", statuses, worker=1, rank_lost=1, **fields)
    of.record("lost", [], worker=1, rank_lost=1, **fields)
    of.record("short", statuses, text="1 of at least 2 workers are left")
    of.record("membership", statuses, generation=1, workers=[0, 2], joined=[])
    of.record("membership", statuses, generation=2, workers=[0, 2, 3], joined=[3])
    of.record("membership", statuses, generation=3, workers=[0, 2, 3, 6, 7], joined=[6, 7])
    assert [replace(alert, time=3.0) for alert in of.alerts] == [
        Alert("lost", "rank 1 was killed", (5,), 3.0),
        Alert("lost", "rank 1 was killed", (1,), 3.0),
        Alert("lost", "rank 1 was killed", (1,), 3.0),
        Alert("short", "1 of at least 2 workers are left", (), 3.0),
        Alert("joined", "worker 3 joined: 3 workers train", (3,), 3.0),
        Alert("joined", "workers 6, 7 joined: 5 workers train", (6, 7), 3.0),
    ]
    of.started(0, 41)
    of.started(4, 44)
    run.of.workers[0].about = {"pid": 40, "host": "a"}
    run.of.workers[0].leaving = True
    run.hand.ready(0, steps=9)
    report = of.report(run.of, statuses, elastic=True)
    assert report.code is None and report.reason == "" and report.kind == "" and report.blamed == ()
    assert report.elastic and report.step == 9 and report.joined == 3 and report.leaving == ()
    assert report.ranks == {0: 0, 1: 1, 2: 2}
    assert report.processes[0] == (40, "a") and report.processes[4] == (44, platform.node())
    assert report.lost == (LostWorker(5, None, 1e9 + 3), LostWorker(1, 1, 1e9 + 3), LostWorker(1, 1, 1e9 + 3))
    assert report.last_seen == {1: LastSeen(7, "computing", "", (0,), 2.0, "waiting")}
    run.of.workers[2].leaving = True
    run.of.end(3, "all is lost", 3.0, kind="hang", workers=(1,))
    report = of.report(run.of, [WorkerStatus(0, 11, "waiting", True, 2.0)], elastic=False)
    assert (report.code, report.reason, report.kind, report.blamed) == (3, "all is lost", "hang", (1,))
    assert report.leaving == (2,) and report.step == 11 and not report.elastic
