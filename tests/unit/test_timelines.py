"""Steps of pipelines from event files: what was measured, and what the clock predicts."""

import doctest
from pathlib import Path
from textwrap import dedent

import event_files as files
import pytest
from event_files import TWO, UNEVEN, change, slower

from paceline.errors import ConfigError
from paceline.observe import records
from paceline.observe.records import read
from paceline.observe.timeline import comparison, drawing, pipelines, summary
from paceline.observe.timeline.comparison import compare
from paceline.observe.timeline.page import html
from paceline.observe.timeline.pipelines import KINDS, operations_of, pipelines_of
from paceline.observe.timeline.times import median_times, profiled_times
from paceline.schedule.pipeline.clock import Timeline, Times, simulate
from paceline.schedule.pipeline.drawing import draw
from paceline.schedule.pipeline.operations import Kind
from paceline.schedule.pipeline.synchronous import gpipe, layerwise, one_forward_one_backward
from paceline.schedule.pipeline.zero_bubble import zero_bubble_h1

THREE = [["a"], ["b"], ["c"]]


def lines(text: str) -> str:
    return dedent(text).strip("\n")


def test_a_measured_step_is_drawn(run: Path) -> None:
    found = compare(run, 0)
    assert draw(found.measured, 1.0) == lines("""
        0  F0 F1                B0--- F2    B1---          B2---
        1        F0--- B0--- F1--- B1---    F2--- B2---
    """)
    assert found.measured.seconds == pytest.approx(simulate(one_forward_one_backward(2, 3), UNEVEN).seconds)


def test_a_step_begins_when_its_first_microbatch_enters(run: Path) -> None:
    """A later stage may wait for it since long before."""
    earlier = {"stage": 1, "peer": 0, "microbatch": 0, "step": 0}
    change(run, 1, {"event": "receive", **earlier}, lambda record: {**record, "seconds": 40.0})
    timeline = compare(run, 0).measured
    assert timeline.workers[0][0].begin == 0.0
    assert min(span.begin for spans in timeline.workers for span in spans) == 0.0


def test_given_cuts_are_predicted_from_the_medians(run: Path) -> None:
    found = compare(run, 3)
    assert not found.from_profile
    assert found.times.forward == pytest.approx((1.2, 2.4))
    assert [sum(pair) for pair in zip(found.times.input, found.times.weight, strict=True)] == pytest.approx([2.4, 2.4])
    assert found.times.transfer == pytest.approx((1.2,))
    assert found.predicted.seconds == pytest.approx(found.measured.seconds * 1.2 / 1.3)
    assert "median time" in found.source


def test_measured_cuts_are_predicted_from_the_times_of_the_layers(tmp_path: Path) -> None:
    files.mark_cut(tmp_path, TWO, times=[[1.0, 2.0], [2.0, 2.0]])
    files.mark_whole(tmp_path, simulate(one_forward_one_backward(2, 3), slower(UNEVEN, 3.0)), 0, 0.0, 3)
    found = compare(tmp_path)
    assert found.from_profile and "measured before training" in found.source
    assert draw(found.predicted, 1.0) == lines("""
        0  F0 F1          B0--- F2    B1---       B2---
        1     F0--- B0--- F1--- B1--- F2--- B2---
    """)
    assert found.measured.seconds == pytest.approx(3 * simulate(one_forward_one_backward(2, 3), UNEVEN).seconds)


def test_halves_and_passes_that_are_computed_again(tmp_path: Path) -> None:
    settings = {"schedule": "zb-h1", "recompute": True}
    files.mark_cut(tmp_path, TWO, times=[[1.0, 4.0], [2.0, 6.0]], pipeline=settings)
    files.mark_whole(tmp_path, simulate(zero_bubble_h1(2, 3), Times.equal(2)), 0, 0.0, 3)
    found = compare(tmp_path)
    assert found.times == profiled_times(found.pipeline)
    assert (found.times.input, found.times.weight) == ((0.0, 4.0), (5.0, 4.0))
    assert found.median_times.input == found.median_times.weight == (1.0, 1.0)
    assert "Each part" in found.source


def test_a_transfer_counts_where_it_was_waited_for(run: Path) -> None:
    """Of those that came before they were needed nobody knows when they arrived."""
    (pipeline,) = pipelines_of(read(run, ("cut", "step")))
    done = list(operations_of(read(run, KINDS, range(1)), pipeline))
    assert median_times(done, 2).transfer == (1.0,)
    late = [one for one in done if one.span.operation.kind is not Kind.RECEIVE]
    assert median_times(late, 2).transfer == (0.0,)


def test_a_short_batch_has_fewer_microbatches(run: Path) -> None:
    files.mark_whole(run, simulate(one_forward_one_backward(2, 2), UNEVEN), 5, 600.0, 3)
    found = compare(run, 5)
    assert found.schedule.microbatches == 2
    assert sum(span.operation.kind is Kind.FORWARD for span in found.predicted.workers[1]) == 2


def test_who_waits_for_whom(run: Path) -> None:
    found = compare(run, 0)
    assert found.activations == (2, 1)
    (first, second), idle = found.waits, found.idle
    assert set(first) == {1} and set(second) == {0}
    sums = [first[1], second[0]]
    spent = zip(found.measured.busy, sums, strict=True)
    assert idle == pytest.approx([max(0.0, found.measured.seconds - busy - waited) for busy, waited in spent])
    assert summary.waiting(found).startswith(f"Rank 0 waited most: {1000 * sums[0]:,.2f} ms for rank 1, ")


def test_who_has_nothing_to_do_waits_for_nobody(tmp_path: Path) -> None:
    """A short batch of one microbatch; workers 1 and 3 are second replicas."""
    files.mark_cut(tmp_path, TWO, workers=4, microbatches=4, pipeline={"schedule": "layerwise", "stages": 2})
    short = simulate(layerwise(2, 1, 1), Times.equal(2)).workers
    files.mark_whole(tmp_path, Timeline((short[0], (), short[1], ())), 0, 0.0, 4)
    found = compare(tmp_path)
    assert summary.waiting(found).startswith("Rank 0 waited most: 3,000.00 ms for rank 2")
    assert found.idle == pytest.approx((0.0, 6.0, 2.0, 6.0))
    assert [row[1] for row in summary.workers(found)[1:]] == ["0", "0", "1", "1"]


def test_nobody_waits(tmp_path: Path) -> None:
    files.mark_cut(tmp_path, [["a"]], workers=2, microbatches=2, pipeline={"stages": 1, "schedule": "gpipe"})
    files.mark_whole(tmp_path, simulate(gpipe(1, 2, 2), Times.equal(1)), 0, 0.0, 2)
    assert summary.waiting(compare(tmp_path)) == "No worker waited for another."


def test_the_folder_one_is_in(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert summary.headline(compare(Path())).startswith(f"Step 4 of {run.name}: 1f1b")


def test_replicas_wait_for_the_worker_that_has_the_microbatch(tmp_path: Path) -> None:
    timeline = simulate(layerwise(2, 4, 2), Times.equal(2))
    files.mark_cut(tmp_path, TWO, workers=4, microbatches=4, pipeline={"schedule": "layerwise", "stages": 2})
    files.mark_whole(tmp_path, timeline, 0, 0.0, 4)
    assert [set(waits) for waits in compare(tmp_path).waits] == [{2}, {3}, {0}, {1}]


def test_a_usual_step_is_chosen(run: Path) -> None:
    """The first three are warm-up; of the others that of median length."""
    assert compare(run).step == 4
    timeline = simulate(one_forward_one_backward(2, 3), slower(UNEVEN, 9.0))
    files.mark_whole(run, timeline, 5, 1000.0, 3)
    assert compare(run).step == 4


def test_a_step_that_a_worker_has_not_finished(run: Path) -> None:
    files.mark_timeline(run, simulate(one_forward_one_backward(2, 3), UNEVEN), 700.0, 5, 3)
    files.mark(run, 1, "step", 720.0, step=5, seconds=20.0)
    with pytest.raises(ConfigError, match=r"--step 5: .* 0 to 4\."):
        compare(run, 5)


def test_a_step_that_one_worker_finished_and_took_again_alone(run: Path) -> None:
    """The other one was lost, and with a single worker nothing is cut."""
    files.mark(run, 1, "step", 720.0, step=5, seconds=20.0)
    files.mark(run, 0, "step", 800.0, generation=1, step=5, seconds=20.0)
    with pytest.raises(ConfigError, match=r"--step 5: .* 0 to 4\."):
        compare(run, 5)


def test_what_a_killed_worker_leaves(run: Path) -> None:
    path = run / "events" / "rank-1.jsonl"
    path.write_bytes(path.read_bytes() + b'{"time": 3.5, "event": "forward", "rank": 1, "gen')
    assert draw(compare(run, 4).measured)
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(first + b"\n\xff\xfe\n[1]\n" + rest)
    assert draw(compare(run, 4).measured)


def test_only_the_events_and_steps_that_are_wanted(run: Path) -> None:
    """A record about no step goes with the one before it."""
    for step in range(5, 8):
        files.mark(run, 0, "forward", 900.0, stage=0, step=step, seconds=0.5)
        files.mark(run, 0, "update", 900.0, stage=0, version=step, seconds=0.5)
    found = list(read(run, ("forward", "update"), range(2, 3)))
    assert [one.get("step") for one in found] == [2, 2, 2, 2, 2, 2]
    found = list(read(run, ("forward", "update"), range(6, 7)))
    assert [(one["event"], one.get("version")) for one in found] == [("forward", None), ("update", 6)]


def test_workers_of_two_generations(run: Path) -> None:
    """Of three workers one is lost in step 5; the others go back to step 3, with another cut."""
    late = run / "lost"
    files.mark_cut(late, THREE)
    three = simulate(one_forward_one_backward(3, 3), Times.equal(3))
    for step in range(5):
        files.mark_whole(late, three, step, 100.0 * step, 3)
    files.mark_timeline(late, three, 500.0, 5, 3)
    files.mark_cut(late, TWO, 600.0, generation=1)
    two = simulate(one_forward_one_backward(2, 3), Times.equal(2))
    files.mark_timeline(late, two, 600.0, 3, 3, generation=1)
    files.mark_step(late, 2, 3, 620.0, seconds=300.0, generation=1)  # with the recovery
    for step in range(4, 7):
        files.mark_whole(late, two, step, 300.0 + 100.0 * step, 3, generation=1)
    newer = {step: compare(late, step) for step in range(3, 7)}
    assert {found.pipeline.generation for found in newer.values()} == {1}
    assert [draw(found.measured) for found in newer.values()] == [draw(two)] * 4
    assert draw(compare(late, 2).measured) == draw(three)
    assert compare(late, 2).pipeline.stages == (("a",), ("b",), ("c",))
    assert "generation 1" in summary.headline(compare(late)) and "generation" not in summary.headline(compare(late, 2))
    with pytest.raises(ConfigError, match="0 to 6"):
        compare(late, 7)


def test_a_cut_in_the_middle_of_a_loop(run: Path) -> None:
    """It is recorded before the end of the step in which it was decided."""
    files.mark_timeline(run, simulate(one_forward_one_backward(2, 3), UNEVEN), 600.0, 5, 3)
    files.mark_cut(run, [["a"], ["b", "c"]], 630.0, again=True)
    files.mark_step(run, 2, 5, 631.0, seconds=31.0)
    files.mark_whole(run, simulate(one_forward_one_backward(2, 3), UNEVEN), 6, 700.0, 3)
    first, second = pipelines_of(read(run, ("cut", "step")))
    assert (first.finished_steps, second.finished_steps) == ([0, 1, 2, 3, 4, 5], [6])
    assert compare(run, 5).pipeline.stages == (("a", "b"), ("c",))
    assert compare(run).step == 6


def test_a_resumed_run(run: Path) -> None:
    """Steps are numbered on, or again; the generation is counted anew."""
    files.mark_cut(run, THREE, 1000.0)
    timeline = simulate(one_forward_one_backward(3, 3), Times.equal(3))
    files.mark_whole(run, timeline, 4, 1001.0, 3)
    assert len(compare(run, 4).measured.workers) == 3
    assert len(compare(run, 3).measured.workers) == 2


def test_a_window_of_a_pipeline_that_never_runs_empty(stream: Path) -> None:
    found = compare(stream, 5)
    assert draw(found.measured, 1.0) == draw(found.predicted, 1.0)
    assert draw(found.measured, 1.0) == lines("""
        0  F0 B3--- U- F1 B0--- F2 B1--- U- F3 B2---
        1  B3 U- F0 B0--- F1 B1--- U- F2 B2--- F3 B3
    """)
    assert found.measured.seconds == pytest.approx(14.0) == found.predicted.seconds
    versions = [
        [span.operation.version for span in timeline.workers[0] if span.operation.kind is Kind.FORWARD]
        for timeline in (found.predicted, found.measured)
    ]
    assert versions == [[9, 10, 10, 11]] * 2


def test_the_last_step_of_a_pipeline_that_never_runs_empty_has_no_end(stream: Path) -> None:
    with pytest.raises(ConfigError, match="0 to 8"):
        compare(stream, 9)
    assert 3 <= compare(stream).step <= 8


@pytest.mark.parametrize(("device", "told"), [("cuda", True), ("cpu", False), (None, False)])
def test_on_gpus_launches_are_timed(tmp_path: Path, device: str | None, told: bool) -> None:
    files.mark_cut(tmp_path, TWO, **({"device": device} if device else {}))
    files.mark_whole(tmp_path, simulate(one_forward_one_backward(2, 3), UNEVEN), 0, 0.0, 3)
    found = compare(tmp_path)
    assert ("times of launches" in summary.clocks(found)) == ("times of launches" in html(found)) == told


def test_updates_of_other_steps_are_not_read(stream: Path) -> None:
    kinds = [one["version"] for one in read(stream, KINDS, range(5, 6)) if one["event"] == "update"]
    assert len(kinds) == 4


@pytest.mark.parametrize("module", [records, pipelines, comparison, summary, drawing])
def test_the_examples_hold(module: object) -> None:
    tried = doctest.testmod(module)  # type: ignore[arg-type]
    assert tried.attempted > 0 and tried.failed == 0
