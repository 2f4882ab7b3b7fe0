"""The simulated clock, with times that can be added up by hand; and its drawing."""

from textwrap import dedent

import pytest

from paceline.errors import ConfigError, InputError
from paceline.schedule.pipeline.clock import Span, Timeline, Times, simulate
from paceline.schedule.pipeline.drawing import draw, listing
from paceline.schedule.pipeline.interleaved import interleaved
from paceline.schedule.pipeline.operations import Kind, Operation, Schedule
from paceline.schedule.pipeline.synchronous import gpipe, layerwise, one_forward_one_backward
from paceline.schedule.pipeline.zero_bubble import zero_bubble_h1


def lines(text: str) -> str:
    return dedent(text).strip("\n")


def begins(timeline: Timeline, worker: int, kind: Kind) -> list[float]:
    return [span.begin for span in timeline.workers[worker] if span.operation.kind == kind]


def test_a_step_by_hand() -> None:
    times = Times((1.0, 2.0), (1.0, 3.0), (1.0, 1.0), (0.5,), (0.0, 0.0), (0.25, 0.75))
    timeline = simulate(layerwise(2, 1), times)
    spans = [(span.operation.kind.value, span.begin, span.end) for span in timeline.workers[0]]
    assert spans == [("F", 0, 1), ("s", 1, 1.5), ("r", 1, 8), ("B", 8, 10), ("U", 10, 10.25)]
    spans = [(span.operation.kind.value, span.begin, span.end) for span in timeline.workers[1]]
    assert spans == [("r", 0, 1.5), ("F", 1.5, 3.5), ("B", 3.5, 7.5), ("s", 7.5, 8), ("U", 7.5, 8.25)]
    assert timeline.seconds == 10.25
    assert timeline.busy == (3.25, 6.75)
    assert timeline.bubbles == pytest.approx((1 - 3.25 / 10.25, 1 - 6.75 / 10.25))
    assert timeline.bubble == pytest.approx(1 - 10 / 20.5)


def test_a_link_carries_one_value_at_a_time_beside_computing() -> None:
    times = Times((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (3.0,), (0.0, 0.0), (0.0, 0.0))
    timeline = simulate(gpipe(2, 3), times)
    assert begins(timeline, 0, Kind.FORWARD) == [0, 1, 2]
    assert begins(timeline, 0, Kind.SEND) == [1, 4, 7]
    assert begins(timeline, 1, Kind.FORWARD) == [4, 7, 10]


def test_the_two_directions_of_a_link_do_not_wait_for_each_other() -> None:
    times = Times((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (4.0,), (0.0, 0.0), (0.0, 0.0))
    timeline = simulate(one_forward_one_backward(2, 3), times)
    assert begins(timeline, 0, Kind.SEND) == [1, 5, 15]
    assert begins(timeline, 1, Kind.SEND) == [8, 12, 22]
    assert begins(timeline, 0, Kind.BACKWARD) == [12, 16, 26]


def test_replicas_wait_for_each_other_in_a_reduce() -> None:
    times = Times((1.0,), (1.0,), (1.0,), (), (5.0,), (0.5,))
    timeline = simulate(gpipe(1, 3, replicas=2), times)
    assert [begins(timeline, worker, Kind.REDUCE) for worker in (0, 1)] == [[6], [6]]
    assert timeline.seconds == 11.5
    assert timeline.busy == (11.5, 8.5)


def test_a_backward_pass_in_halves_takes_as_long_as_a_whole_one() -> None:
    times = Times((1.0,), (2.0,), (3.0,), (), (0.0,), (0.0,))
    assert simulate(zero_bubble_h1(1, 4), times).seconds == simulate(gpipe(1, 4), times).seconds == 24


def test_times_of_another_number_of_stages() -> None:
    with pytest.raises(ConfigError, match=r"times of \[3, 3, 3, 3, 3\] stages and 2 boundaries do not fit 2 stages"):
        simulate(gpipe(2, 2), Times.equal(3))


def test_a_schedule_that_cannot_go_on_has_no_times() -> None:
    wait = Operation(Kind.RECEIVE, 0, 0, peer=1)
    with pytest.raises(InputError, match="deadlock"):
        simulate(Schedule("none", 2, 1, ((wait,), ())), Times.equal(2))


def test_nothing_takes_no_time() -> None:
    empty = Timeline(((), ()))
    assert (empty.seconds, empty.busy, empty.bubble) == (0.0, (0, 0), 0.0)
    assert draw(empty) == "0\n1"


def test_a_drawing() -> None:
    assert draw(simulate(zero_bubble_h1(3, 3), Times.equal(3))) == lines("""
        0  F0 F1 F2       I0 W0 I1 W1 I2 W2
        1     F0 F1    I0 F2 I1 W0 I2 W1 W2
        2        F0 I0 F1 I1 F2 I2 W0 W1 W2
    """)
    times = Times((1.0, 2.0), (1.0, 1.0), (1.0, 1.0), (1.0,), (0.0, 0.0), (2.0, 2.0))
    assert draw(simulate(layerwise(2, 1), times)) == lines("""
        0  F0                   B0--- U----
        1        F0--- B0--- U----
    """)


def test_a_drawing_of_workers_with_several_stages() -> None:
    assert draw(simulate(interleaved(2, 2, 2), Times.equal(4, 1.0, 0.5, 0.5))) == lines("""
        0  F0.0 F0.1 F2.0 F2.1      B2.0      B2.1 B0.0 B0.1
        1       F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1
    """)


def test_predicted_and_measured_on_the_same_scale() -> None:
    predicted = simulate(one_forward_one_backward(2, 2), Times.equal(2, 0.1, 0.1, 0.1))
    slower = tuple(
        tuple(Span(span.operation, span.begin * 2, span.end * 2) for span in spans) for spans in predicted.workers
    )
    assert draw(predicted, column=0.1) == lines("""
        0  F0 F1       B0---    B1---
        1     F0 B0--- F1 B1---
    """)
    assert draw(Timeline(slower), column=0.1) == lines("""
        0  F0--- F1---             B0---------       B1---------
        1        F0--- B0--------- F1--- B1---------
    """)


def test_a_short_operation_is_drawn_without_hiding_the_next_one() -> None:
    one, two = Operation(Kind.FORWARD, 0, 0), Operation(Kind.FORWARD, 0, 1)
    timeline = Timeline(((Span(one, 0.0, 0.01), Span(two, 0.01, 1.0), Span(one, 1.0, 2.0)),))
    assert draw(timeline, column=1.0) == "0  F1 F0"


def test_a_listing() -> None:
    assert listing(gpipe(1, 2, replicas=2)) == "0  F0 B0 + U:1\n1  F1 B1 + U:1"
