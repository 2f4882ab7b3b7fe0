"""The ledger of a run: which steps were applied, how often, and what faults cost."""

import json
import math
import runpy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.observe import ledger
from paceline.observe.ledger import Records

durations = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "bench" / "durations.py")))

Line = dict[str, Any]


def steps(rank: int, numbers: range, generation: int = 0, begin: float = 0.0, **more: Any) -> list[Line]:
    """What a process records of steps of one second each; step s ends at second s + 1 after ``begin``."""
    return [
        {"time": begin + step + 1, "event": "step", "rank": rank, "generation": generation, "step": step}
        | {"samples": 32, "loss": 1 / (step + 1)}
        | more
        for step in numbers
    ]


def gathered(time: float, generation: int, workers: list[int], step: int = 0, **more: Any) -> list[Line]:
    """What rank 0 records when the workers come together."""
    event = "recovered" if generation else "gathered"
    known = {"time": time, "event": event, "rank": 0, "generation": generation, "workers": workers, "step": step}
    return [known | {"seconds": 0.5} | more]


def of(*lines: list[Line]) -> Records:
    return ledger.records_of([line for part in lines for line in part])


def test_an_undisturbed_run() -> None:
    records = of(steps(0, range(10)), steps(1, range(10)))
    assert ledger.check(records, 10) == []
    assert ledger.check(records, 10, lambda step: 32) == []


def test_a_gap_and_steps_beyond_the_end() -> None:
    records = of(steps(0, range(4)), steps(0, range(6, 9)))
    assert ledger.check(records, 8) == [
        "step 4 was never applied",
        "step 5 was never applied",
        "step 8 is beyond the last one, 7",
    ]


def test_a_worker_is_lost_and_its_step_repeated() -> None:
    """Worker 1 had applied step 5 when it was killed. The others had not: ranks move up, and they do it again."""
    records = of(
        gathered(0, 0, [0, 1, 2]),
        steps(0, range(5)),
        steps(1, range(6)),
        steps(2, range(5)),
        gathered(7, 1, [0, 2], step=5),
        steps(0, range(5, 10), 1, 2),
        steps(1, range(5, 10), 1, 2),
    )
    assert ledger.check(records, 10) == []
    assert {one.process for one in records.applied if one.rank == 1} == {"worker 1", "worker 2"}


def test_a_worker_takes_over_a_step_that_another_one_had_applied() -> None:
    """Worker 2 was at step 5 when worker 1 was killed, and gets the model and the outcome of worker 0."""
    records = of(
        gathered(0, 0, [0, 1, 2]),
        steps(0, range(6)),
        steps(2, range(5)),
        gathered(7, 1, [0, 2, 3], step=6, joined=[3]),
        steps(1, range(5, 10), 1, 2),
        steps(0, range(6, 10), 1, 2),
        steps(2, range(6, 10), 1, 2),
    )
    assert ledger.check(records, 10) == []


def test_a_step_that_a_survivor_had_applied_must_not_be_repeated() -> None:
    records = of(
        gathered(0, 0, [0, 1, 2]),
        steps(0, range(5)),
        steps(2, range(6)),
        gathered(7, 1, [0, 2], step=5),
        steps(0, range(5, 10), 1, 2),
        steps(1, range(5, 10), 1, 2),
    )
    assert ledger.check(records, 10) == ["worker 2 applied step 5 after step 5"]


def test_a_process_that_goes_back() -> None:
    records = of(steps(0, range(6)), steps(0, range(4, 8), begin=4.5))
    assert ledger.check(records, 8) == ["rank 0 applied step 4 after step 5"]


def test_all_are_lost_and_resume_from_a_checkpoint() -> None:
    resumed = [{"time": 20.0, "event": "resume", "rank": 0, "step": 4}]
    again = steps(0, range(4, 8), begin=20)
    assert ledger.check(of(steps(0, range(6)), resumed, again), 8) == []
    assert ledger.check(of(steps(0, range(6)), resumed, again[1:]), 8) == ["step 4 was never applied"]


def test_all_are_lost_and_others_begin_anew() -> None:
    records = of(
        gathered(0, 0, [0, 1]),
        steps(0, range(6)),
        gathered(9, 1, [2], step=0, joined=[2]),
        steps(0, range(8), 1, 9),
    )
    assert ledger.check(records, 8) == []
    assert ledger.completions(records) == [*range(10, 18)]
    assert ledger.check(Records(records.applied[:-3], records.recovered), 8)[0] == "step 5 was never applied"


def test_workers_that_do_not_tell_the_same() -> None:
    records = of(steps(0, range(3)), steps(1, range(2)), steps(1, range(2, 3), loss=0.5, samples=31))
    problems = ledger.check(records, 3, lambda step: 32)
    assert problems[0] == "step 2 has different samples: 31, 32"
    assert problems[1] == "step 2 has 31 samples instead of 32"
    assert problems[2].startswith("step 2 has different losses: ")
    assert ledger.check(of(steps(0, range(2), loss=math.nan), steps(1, range(2), loss=math.nan)), 2) == []


ASYNCHRONOUS = [
    {"strategy": "hogwild"},
    {"strategy": "parameter-server", "server.mode": "async"},
    {"strategy": "parameter-server", "server.mode": "bounded"},
]


def start(**more: Any) -> list[Line]:
    """What a process records when its session begins."""
    return [{"time": 0.0, "event": "start", "rank": 0, "generation": 0, "workers": 2} | more]


def done(numbers: Sequence[int], versions: Sequence[int] = (), generation: int = 0, **more: Any) -> list[Line]:
    """The updates of one worker; without versions, of one that is alone."""
    return [
        {"time": step + 0.9, "event": "update", "rank": 0, "generation": generation, "step": step, "delay": 0}
        | ({"version": version} if version else {})
        | more
        for step, version in zip(numbers, versions or [0] * len(numbers), strict=True)
    ]


def loops(count: int) -> list[Line]:
    """Two workers whose loops come to all steps, with the losses that they know of."""
    return [*steps(0, range(count), loss=math.nan), *steps(1, range(count))]


@pytest.mark.parametrize("rule", ASYNCHRONOUS)
def test_each_step_has_one_update_of_one_worker(rule: Line) -> None:
    begin = start(**rule)
    assert ledger.check(of(begin, loops(6), done([0, 2, 3], [1, 3, 4]), done([1, 4, 5], [2, 5, 6])), 6) == []
    lost = of(begin, loops(6), done([0, 2, 3], [1, 3, 4]), done([1, 5], [2, 5]))
    assert ledger.check(lost, 6) == ["step 4 was never applied"]
    doubled = of(begin, loops(6), done([0, 2, 3], [1, 3, 5]), done([1, 3, 4, 5], [2, 4, 6, 7]))
    assert ledger.check(doubled, 6) == ["step 3 was applied 2 times"]
    assert ledger.check(of(begin, loops(4), done(range(5), range(1, 6))), 4) == ["step 4 is beyond the last one, 3"]
    skipped = done([1], event="skipped", reason="nan")
    assert ledger.check(of(begin, loops(3), done([0, 2], [1, 2]), skipped), 3) == []


def test_samples_count_with_asynchronous_strategies_too() -> None:
    records = of(start(strategy="hogwild"), loops(2), steps(2, range(1, 2), samples=31), done([0, 1], [1, 2]))
    assert ledger.check(records, 2) == ["step 1 has different samples: 31, 32"]


def test_the_record_of_an_update_may_be_lost_with_its_worker() -> None:
    """Worker 1 made updates 3 and 4 and was killed before it wrote them down."""
    begin = [*start(strategy="hogwild"), *gathered(0, 0, [0, 1, 2]), *loops(8)]
    after = gathered(4, 1, [0, 2], step=4, lost=[1])
    records = of(begin, done([0, 1], [1, 2]), after, done(range(4, 8), range(5, 9), 1))
    assert ledger.check(records, 8) == []
    records = of(begin, done([0, 1], [1, 2]), after, done([4, 6, 7], [5, 6, 7], 1))
    assert ledger.check(records, 8) == [f"step {step} was never applied" for step in (2, 3, 5)]
    records = of(begin, done([0, 1], [1, 2]), gathered(4, 1, [0], step=4, lost=[1, 2]), done(range(4, 8), (), 1))
    assert ledger.check(records, 8) == []  # the last one knows no numbers


def test_updates_of_lost_workers_stay_unless_all_are_new() -> None:
    begin = [*start(strategy="hogwild"), *gathered(0, 0, [0, 1]), *loops(6), *done(range(4), range(1, 5))]
    on = gathered(4, 1, [0], step=2, lost=[1])
    assert ledger.check(of(begin, on, done([4, 5], [5, 6], 1)), 6) == []
    assert ledger.check(of(begin, on, done([3, 4, 5], [5, 6, 7], 1)), 6) == ["step 3 was applied 2 times"]
    anew = gathered(4, 1, [2], step=2, lost=[0, 1], joined=[2])
    assert ledger.check(of(begin, anew, done(range(2, 6), range(3, 7), 1)), 6) == []
    resumed = [{"time": 4.0, "event": "resume", "rank": 0, "step": 2}]
    again = [one | {"time": one["time"] + 4} for one in done(range(2, 6), range(3, 7), 1)]
    assert ledger.check(of(begin, resumed, again), 6) == []


def test_an_update_after_the_others_went_on_does_not_count() -> None:
    """Worker 1 was stopped in step 3 and dropped, and wakes up later."""
    begin = [*start(strategy="hogwild"), *gathered(0, 0, [0, 1]), *loops(6), *done(range(3), range(1, 4))]
    on = gathered(4, 1, [0], step=2, lost=[1])
    late = done([3], [4], time=5.0)
    assert ledger.check(of(begin, on, done([3, 4, 5], [4, 5, 6], 1, time=4.5), late), 6) == []
    resumed = [{"time": 10.0, "event": "resume", "rank": 0, "step": 3}]  # in a new launch
    assert ledger.check(of(begin, on, resumed, done([3, 4, 5], [4, 5, 6], time=11.0)), 6) == []


@pytest.mark.parametrize(
    ("rule", "own"),
    [
        ({"strategy": "local-sgd", "server.mode": "async"}, True),
        ({"strategy": "pipeline", "pipeline.schedule": "pipedream"}, True),
        ({"strategy": "pipeline", "pipeline.schedule": "2bw"}, True),
        ({"strategy": "pipeline", "pipeline.schedule": "1f1b"}, False),
        ({"strategy": "allreduce", "server.mode": "async", "pipeline.schedule": "2bw"}, False),
        ({"strategy": "parameter-server", "server.mode": "sync"}, False),
    ],
)
def test_some_workers_report_losses_of_their_own(rule: Line, own: bool) -> None:
    records = of(start(**rule), steps(0, range(3)), steps(1, range(3), loss=7.0))
    assert len(ledger.check(records, 3)) == (0 if own else 3)
    assert ledger.check(of(start(**rule), steps(0, range(2)), steps(1, range(2))), 3) == ["step 2 was never applied"]


def test_the_time_of_a_step_is_that_of_its_update() -> None:
    assert ledger.completions(of(start(strategy="hogwild"), loops(2), done([1, 0], [1, 2], time=3.5))) == [3.5, 3.5]


def test_stalls_goodput_and_replacement() -> None:
    """A worker is killed at 5.5 s; step 5 ends at 9 s instead of 6 s, and a new worker joins at 12 s."""
    records = of(
        steps(0, range(5)),
        gathered(8, 1, [0], 5, lost=[1]),
        steps(0, range(5, 9), 1, 3),
        gathered(12, 2, [0, 1], 9, joined=[1]),
        steps(0, range(9, 20), 2, 3),
    )
    times = ledger.completions(records)
    assert times == [1, 2, 3, 4, 5, *range(9, 24)]
    usual = durations.step_seconds(times)
    assert usual == 1
    assert durations.stall(times, 5.5, usual) == 3
    assert durations.stall(times, 4.5, usual) == 3  # the victim had given its part: the next step waits
    assert durations.stall(times, 15.5, usual) == 0
    assert durations.replaced_after(records, 5.5) == 6.5
    assert durations.replaced_after(records, 13) is None
    assert durations.goodput(times, 0, usual) == pytest.approx(20 / 23)


def test_numbers_of_nothing() -> None:
    assert ledger.completions(Records()) == []
    assert durations.step_seconds([]) == durations.goodput([], 0, 1) == durations.stall([], 1, 1) == 0
    assert math.isnan(durations.percentile([], 0.5))
    assert ledger.check(Records(), 0) == []


def test_percentiles_are_values() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [durations.percentile(values, part) for part in (0.2, 0.5, 0.99, 1.0)] == [1.0, 3.0, 5.0, 5.0]


def test_files_are_read_and_half_a_line_left_out(tmp_path: Path) -> None:
    text = "\n".join(map(json.dumps, gathered(0, 0, [4]) + steps(0, range(3))))
    (tmp_path / "rank-0.jsonl").write_text(text + '\n{"time": 9.0, "ev')
    (tmp_path / "other.log").write_text("no record\n")
    records = ledger.read(tmp_path)
    assert [one.step for one in records.applied] == [0, 1, 2]
    assert {one.process for one in records.applied} == {"worker 4"}
