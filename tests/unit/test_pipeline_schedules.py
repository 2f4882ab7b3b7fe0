"""Synchronous pipelines: the lists of small ones spelled out, and what theory says about all of them."""

import doctest
from collections.abc import Callable
from textwrap import dedent

import pytest
from async_schedules import pipedream, pipedream_2bw
from schedule_proof import prove

from paceline.errors import ConfigError
from paceline.schedule.pipeline import drawing, first_pass, replicas
from paceline.schedule.pipeline import synchronous as pipeline
from paceline.schedule.pipeline.clock import Times, simulate
from paceline.schedule.pipeline.drawing import draw, listing
from paceline.schedule.pipeline.interleaved import interleaved
from paceline.schedule.pipeline.operations import Kind, Schedule
from paceline.schedule.pipeline.replicas import backwards_first, runs
from paceline.schedule.pipeline.synchronous import gpipe, layerwise, one_forward_one_backward
from paceline.schedule.pipeline.transfers import build_schedule
from paceline.schedule.pipeline.zero_bubble import zero_bubble_h1, zero_bubble_v
from paceline.schedule.shares import even

STAGES = range(1, 7)
MICROBATCHES = range(1, 14)
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "layerwise": layerwise,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
    "pipedream": pipedream,
    "2bw": pipedream_2bw,
}


def lines(text: str) -> str:
    """A drawing in a test, without its indentation."""
    return dedent(text).strip("\n")


def bubble(schedule: Schedule, forward: float = 1.0, half: float = 1.0) -> float:
    return simulate(schedule, Times.equal(schedule.stages, forward, half, half)).bubble


@pytest.mark.parametrize("name", ["layerwise", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_the_first_pass_of_a_loss_over_the_batch(name: str) -> None:
    """It has the forward passes of the schedule on the same workers, without waits if each holds one stage."""
    for stages in range(2, 5):
        schedule = SCHEDULES[name](stages, 3 * stages, *([2] if name == "interleaved" else []))
        first = first_pass.first_pass(schedule)
        timeline = simulate(first, Times.equal(first.stages))  # fails on a deadlock
        done = [one for spans in timeline.workers for one, *_ in spans if one.kind is Kind.FORWARD]
        assert len(done) == len({*done}) == first.stages * first.microbatches
        for one in done:
            assert first.worker_of(one.stage, one.microbatch) == schedule.worker_of(one.stage, one.microbatch)
        if first.stages == stages:
            assert timeline.seconds == stages + first.microbatches - 1


def test_layerwise() -> None:
    assert listing(layerwise(3, 2)) == lines("""
        0  F0 s0> r0< B0 F1 s1> r1< B1 U:1
        1  r0> F0 s0> r0< B0 s0< r1> F1 s1> r1< B1 s1< U:1
        2  r0> F0 B0 s0< r1> F1 B1 s1< U:1
    """)


def test_gpipe() -> None:
    assert listing(gpipe(2, 3)) == lines("""
        0  F0 s0> F1 s1> F2 s2> r0< B0 r1< B1 r2< B2 U:1
        1  r0> F0 r1> F1 r2> F2 B0 s0< B1 s1< B2 s2< U:1
    """)


def test_one_forward_one_backward() -> None:
    assert listing(one_forward_one_backward(3, 4)) == lines("""
        0  F0 s0> F1 s1> F2 s2> r0< B0 F3 s3> r1< B1 r2< B2 r3< B3 U:1
        1  r0> F0 s0> r1> F1 s1> r0< B0 s0< r2> F2 s2> r1< B1 s1< r3> F3 s3> r2< B2 s2< r3< B3 s3< U:1
        2  r0> F0 B0 s0< r1> F1 B1 s1< r2> F2 B2 s2< r3> F3 B3 s3< U:1
    """)
    assert listing(one_forward_one_backward(4, 5), transfers=False) == lines("""
        0  F0 F1 F2 F3 B0 F4 B1 B2 B3 B4 U:1
        1  F0 F1 F2 B0 F3 B1 F4 B2 B3 B4 U:1
        2  F0 F1 B0 F2 B1 F3 B2 F4 B3 B4 U:1
        3  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 U:1
    """)


def test_a_single_stage_sends_nothing() -> None:
    for schedule in (layerwise(1, 2), one_forward_one_backward(1, 2)):
        assert listing(schedule) == "0  F0 B0 F1 B1 U:1"


def test_interleaved() -> None:
    assert listing(interleaved(2, 2, 2)) == lines("""
        0  F0.0 s0.0> F0.1 s0.1> r2.0> F2.0 s2.0> r2.1> F2.1 s2.1> r2.0< B2.0 s2.0< r2.1< B2.1 s2.1< r0.0< B0.0 r0.1< B0.1 U0:1 U2:1
        1  r1.0> F1.0 s1.0> r1.1> F1.1 s1.1> r3.0> F3.0 B3.0 s3.0< r3.1> F3.1 B3.1 s3.1< r1.0< B1.0 s1.0< r1.1< B1.1 s1.1< U1:1 U3:1
    """)  # noqa: E501
    assert listing(interleaved(2, 3, 2), transfers=False) == lines("""
        0  F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 B2.1 B2.2 B0.0 B0.1 B0.2 U0:1 U2:1
        1  F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 B1.0 B1.1 B1.2 U1:1 U3:1
    """)


def test_zero_bubble_h1() -> None:
    assert listing(zero_bubble_h1(2, 3)) == lines("""
        0  F0 s0> F1 s1> r0< I0 W0 F2 s2> r1< I1 W1 r2< I2 W2 U:1
        1  r0> F0 I0 s0< r1> F1 I1 s1< W0 r2> F2 I2 s2< W1 W2 U:1
    """)
    assert listing(zero_bubble_h1(3, 4), transfers=False) == lines("""
        0  F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 U:1
        1  F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3 U:1
        2  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 U:1
    """)


def test_zero_bubble_v() -> None:
    assert listing(zero_bubble_v(2, 2)) == lines("""
        0  F0.0 s0.0> F0.1 s0.1> r3.0> F3.0 I3.0 s3.0< W3.0 r3.1> F3.1 I3.1 s3.1< W3.1 r0.0< I0.0 W0.0 r0.1< I0.1 W0.1 U0:1 U3:1
        1  r1.0> F1.0 F2.0 s2.0> r1.1> F1.1 F2.1 s2.1> r2.0< I2.0 W2.0 I1.0 s1.0< W1.0 r2.1< I2.1 W2.1 I1.1 s1.1< W1.1 U1:1 U2:1
    """)  # noqa: E501
    assert listing(zero_bubble_v(2, 4), transfers=False) == lines("""
        0  F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 F0.3 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 F3.3 I3.3 W3.3 I0.2 W0.2 I0.3 W0.3 U0:1 U3:1
        1  F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 F1.3 I1.1 W1.1 F2.3 I2.2 W2.2 I1.2 I2.3 I1.3 W1.2 W2.3 W1.3 U1:1 U2:1
    """)  # noqa: E501


def test_replicas_share_the_microbatches_and_reduce() -> None:
    assert listing(one_forward_one_backward(2, 3, replicas=2)) == lines("""
        0  F0 s0> F1 s1> r0< B0 r1< B1 + U:1
        1  F2 s2> r2< B2 + U:1
        2  r0> F0 B0 s0< r1> F1 B1 s1< + U:1
        3  r2> F2 B2 s2< + U:1
    """)
    assert listing(interleaved(2, 4, 2, replicas=2), transfers=False) == lines("""
        0  F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1 +0 +2 U0:1 U2:1
        1  F0.2 F0.3 F2.2 F2.3 B2.2 B2.3 B0.2 B0.3 +0 +2 U0:1 U2:1
        2  F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1 +1 +3 U1:1 U3:1
        3  F1.2 F1.3 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3 +1 +3 U1:1 U3:1
    """)


def test_uneven_replicas_take_microbatches_as_they_come() -> None:
    schedule = one_forward_one_backward(2, 4, replicas=(2, 1))
    assert listing(schedule) == lines("""
        0  F0 s0> F1 s1> r0< B0 r1< B1 + U:1
        1  F2 s2> F3 s3> r2< B2 r3< B3 + U:1
        2  r0> F0 B0 s0< r2> F2 B2 s2< r1> F1 B1 s1< r3> F3 B3 s3< U:1
    """)
    assert [schedule.worker_of(0, microbatch) for microbatch in range(4)] == [0, 0, 1, 1]
    assert listing(gpipe(2, 4, replicas=(1, 2)), transfers=False) == lines("""
        0  F0 F2 F1 F3 B0 B2 B1 B3 U:1
        1  F0 F1 B0 B1 + U:1
        2  F2 F3 B2 B3 + U:1
    """)


ALL: dict[str, Callable[[int, int, int], Schedule]] = {
    "layerwise": layerwise,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved of 2": lambda workers, count, copies: interleaved(workers, count, 2, copies),
    "interleaved of 3": lambda workers, count, copies: interleaved(workers, count, 3, copies),
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_every_schedule_is_proved(name: str, copies: int) -> None:
    for stages in STAGES:
        for count in MICROBATCHES[copies - 1 :]:
            schedule = ALL[name](stages, count, copies)
            assert prove(schedule).versions == (1,) * len(schedule.workers)
            for worker, operations in enumerate(schedule.workers):
                share = even(count, copies)[worker % copies]
                for stage in schedule.stages_of(worker):
                    assert schedule.workers_of(stage)[worker % copies] == worker
                    mine = [one for one in operations if one.stage == stage]
                    forwards = [one.microbatch for one in mine if one.kind == Kind.FORWARD]
                    ends = [one.microbatch for one in mine if one.kind in (Kind.BACKWARD, Kind.WEIGHT)]
                    assert forwards == ends == list(share)


UNEVEN = [(2, 1), (1, 2), (3, 1), (1, 3), (3, 2), (2, 2, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (4, 2, 1), (1, 2, 3, 1)]


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize("counts", UNEVEN, ids=str)
def test_uneven_replicas_are_proved(counts: tuple[int, ...], schedule: Callable[..., Schedule]) -> None:
    for count in range(max(counts), 14):
        made = schedule(len(counts), count, counts)
        prove(made)
        worker = 0
        for stage, copies in enumerate(counts):
            for share in even(count, copies):
                assert made.stages_of(worker) == (stage,)
                done = [one.microbatch for one in made.workers[worker] if one.kind == Kind.BACKWARD]
                assert sorted(done) == list(share)
                for run in runs(counts, count):
                    assert sorted(one for one in done if one in run) == [one for one in done if one in run]
                worker += 1


@pytest.mark.parametrize("made", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize("counts", UNEVEN, ids=str)
def test_uneven_replicas_are_as_fast_as_their_stages_together(
    counts: tuple[int, ...], made: Callable[..., Schedule]
) -> None:
    units = tuple(float(copies) for copies in counts)
    none = (0.0,) * len(counts)
    times = Times(units, units, units, none[1:], none, none)
    for count in (24, 48):
        seconds = simulate(made(len(counts), count, counts), times).seconds
        assert seconds <= 3 * count + 3.5 * sum(counts)


@pytest.mark.parametrize("counts", UNEVEN, ids=str)
def test_uneven_replicas_keep_few_microbatches_under_way(counts: tuple[int, ...]) -> None:
    for count in (24, 96):
        live = prove(one_forward_one_backward(len(counts), count, counts)).activations
        behind = [sum(counts[stage:]) / copies for stage, copies in enumerate(counts) for _ in range(copies)]
        assert all(most <= 3 * least for most, least in zip(live, behind, strict=True))


def test_what_was_sent_first_is_received_first() -> None:
    """Worker 0 sends the gradient for B1.0 before the output for F1.3, worker 1 needs them the other way round."""
    first, second = listing(interleaved(2, 5, 2)).splitlines()
    assert "B2.0 s2.0< F0.3 s0.3>" in first
    assert "r1.0< r1.3> F1.3 s1.3> B1.0" in second


def test_equal_replicas_in_turns_are_one_forward_one_backward() -> None:
    for stages in STAGES:
        for count in MICROBATCHES:
            orders = backwards_first((1,) * stages, count)
            made = build_schedule("1f1b", stages, count, orders)
            closed = one_forward_one_backward(stages, count)
            assert simulate(made, Times.equal(stages)).seconds == simulate(closed, Times.equal(stages)).seconds
    assert gpipe(3, 7, (2, 2, 2)) == gpipe(3, 7, 2)


@pytest.mark.parametrize("stages", STAGES)
def test_bubbles_are_those_of_theory(stages: int) -> None:
    for count in MICROBATCHES:
        idle = (stages - 1) / (count + stages - 1)
        assert bubble(gpipe(stages, count)) == pytest.approx(idle)
        assert bubble(one_forward_one_backward(stages, count)) == pytest.approx(idle)
        assert bubble(layerwise(stages, count)) == pytest.approx(1 - 1 / stages)
        if count >= stages:
            for chunks in (2, 3):
                small = (stages - 1) / (chunks * count + stages - 1)
                assert bubble(interleaved(stages, count, chunks)) == pytest.approx(small)
            assert bubble(zero_bubble_h1(stages, count)) == pytest.approx((stages - 1) / (3 * count + stages - 1))
        if count >= 2 * stages - 1:
            assert bubble(zero_bubble_v(stages, count)) == pytest.approx((stages - 1) / (6 * count + stages - 1))


def test_zero_bubble_at_four_workers_and_eight_microbatches() -> None:
    assert bubble(one_forward_one_backward(4, 8)) == pytest.approx(3 / 11)
    assert bubble(zero_bubble_h1(4, 8)) == pytest.approx(3 / 27)
    assert bubble(zero_bubble_v(4, 8)) == pytest.approx(3 / 51)
    assert max(prove(zero_bubble_v(4, 8)).activations) / 2 == max(prove(one_forward_one_backward(4, 8)).activations)


@pytest.mark.parametrize("stages", STAGES)
def test_live_activations_are_those_of_theory(stages: int) -> None:
    for count in MICROBATCHES:
        assert prove(layerwise(stages, count)).activations == (1,) * stages
        assert prove(gpipe(stages, count)).activations == (count,) * stages
        least = tuple(min(count, stages - stage) for stage in range(stages))
        assert prove(one_forward_one_backward(stages, count)).activations == least
        assert max(prove(zero_bubble_h1(stages, count)).activations) <= least[0]
        assert max(prove(zero_bubble_v(stages, count)).activations) <= 2 * least[0]


@pytest.mark.parametrize("forward, half", [(1.0, 0.5), (2.0, 1.0), (1.0, 2.0)])
def test_times_that_are_not_equal_keep_zero_bubble_ahead(forward: float, half: float) -> None:
    for count in (8, 12):
        plain = bubble(one_forward_one_backward(4, count), forward, half)
        assert bubble(zero_bubble_h1(4, count), forward, half) < plain
        assert bubble(zero_bubble_v(4, count), forward, half) < plain


def test_a_step_drawn() -> None:
    times = Times.equal(4, 1.0, 0.5, 0.5)
    assert draw(simulate(one_forward_one_backward(4, 4), times)) == lines("""
        0  F0 F1 F2 F3          B0    B1    B2    B3
        1     F0 F1 F2       B0 F3 B1    B2    B3
        2        F0 F1    B0 F2 B1 F3 B2    B3
        3           F0 B0 F1 B1 F2 B2 F3 B3
    """)


@pytest.mark.parametrize(
    "name, arguments, said",
    [
        ("gpipe", (0, 4), "stages of at least 1, not 0"),
        ("gpipe", (2.5, 4), "a whole number of stages, not 2.5"),
        ("zb-v", (2, 4.0), "a whole number of microbatches, not 4.0"),
        ("layerwise", (-1, 4), "stages of at least 1, not -1"),
        ("1f1b", (2, 0), "microbatches of at least 1, not 0"),
        ("1f1b", (2, 1, 2), "microbatches of at least 2, not 1"),
        ("1f1b", (2, 4, (2, 1, 1)), "are for 3 stages, but there are 2"),
        ("gpipe", (2, 4, (2, 0)), "replicas of at least 1, not 0"),
        ("gpipe", (2, 4, 0), "replicas of at least 1, not 0"),
        ("layerwise", (2, 4, 0), "replicas of at least 1, not 0"),
        ("interleaved", (2, 4, 1), "chunks of at least 2, not 1"),
        ("interleaved", (0, 4, 2), "workers of at least 1, not 0"),
        ("zb-h1", (0, 4), "stages of at least 1, not 0"),
        ("zb-v", (2, 3, 4), "microbatches of at least 4, not 3"),
    ],
)
def test_what_cannot_be_scheduled(name: str, arguments: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SCHEDULES[name](*arguments)


def test_all_schedules_have_a_name() -> None:
    assert set(SCHEDULES) == {"layerwise", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream", "2bw"}
    for name, arguments in {name: (2,) if name in ("interleaved", "2bw") else () for name in SCHEDULES}.items():
        assert SCHEDULES[name](2, 4, *arguments).name == name


@pytest.mark.parametrize("module", [drawing, first_pass, pipeline, replicas])
def test_the_examples_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
