"""Pipelines that are not emptied: the lists of small ones spelled out, which weights are used, how many are kept."""

from itertools import pairwise
from textwrap import dedent

import pytest
from async_schedules import pipedream, pipedream_2bw
from schedule_proof import prove

from paceline.errors import ConfigError
from paceline.schedule.pipeline.clock import Times, simulate
from paceline.schedule.pipeline.drawing import listing
from paceline.schedule.pipeline.operations import Kind, Schedule
from paceline.schedule.pipeline.pipedream import (
    AsyncPipeline,
    drain,
    pipedream_2bw_pipeline,
    pipedream_pipeline,
    window,
)

REPLICAS = [(2, 2), (2, 1), (1, 2), (3, 1), (1, 4, 2), (2, 3), (4, 2, 1)]


def lines(text: str) -> str:
    return dedent(text).strip("\n")


def joined(*parts: Schedule) -> Schedule:
    """Windows one after the other."""
    workers = tuple(sum(each, ()) for each in zip(*(part.workers for part in parts), strict=True))
    return Schedule(parts[0].name, parts[0].stages, parts[-1].microbatches, workers)


def versions(schedule: Schedule, stage: int) -> list[int]:
    """Which weights each microbatch has used."""
    forwards = [one for operations in schedule.workers for one in operations if one[:2] == (Kind.FORWARD, stage)]
    return [one.version for one in sorted(forwards, key=lambda one: one.microbatch)]


def test_pipedream() -> None:
    assert listing(pipedream(2, 3)) == lines("""
        0  F0 s0> F1 s1> r0< B0 U:1 F2:1 s2> r1< B1 U:2 r2< B2:1 U:3
        1  r0> F0 B0 s0< U:1 r1> F1:1 B1:1 s1< U:2 r2> F2:2 B2:2 s2< U:3
    """)
    assert listing(pipedream(3, 5), transfers=False) == lines("""
        0  F0 F1 F2 B0 U:1 F3:1 B1 U:2 F4:2 B2 U:3 B3:1 U:4 B4:2 U:5
        1  F0 F1 B0 U:1 F2:1 B1 U:2 F3:2 B2:1 U:3 F4:3 B3:2 U:4 B4:3 U:5
        2  F0 B0 U:1 F1:1 B1:1 U:2 F2:2 B2:2 U:3 F3:3 B3:3 U:4 F4:4 B4:4 U:5
    """)


def test_an_update_after_several_backward_passes() -> None:
    assert listing(pipedream(2, 5, every=2), transfers=False) == lines("""
        0  F0 F1 B0 F2 B1 U:1 F3:1 B2 F4:1 B3:1 U:2 B4:1 U:3
        1  F0 B0 F1 B1 U:1 F2:1 B2:1 F3:1 B3:1 U:2 F4:2 B4:2 U:3
    """)


def test_with_vertical_sync_all_stages_use_the_same_version() -> None:
    assert listing(pipedream(3, 5, vertical_sync=True), transfers=False) == lines("""
        0  F0 F1 F2 B0 U:1 F3:1 B1 U:2 F4:2 B2 U:3 B3:1 U:4 B4:2 U:5
        1  F0 F1 B0 U:1 F2 B1 U:2 F3:1 B2 U:3 F4:2 B3:1 U:4 B4:2 U:5
        2  F0 B0 U:1 F1 B1 U:2 F2 B2 U:3 F3:1 B3:1 U:4 F4:2 B4:2 U:5
    """)
    for stages in range(1, 6):
        for every in (1, 2, 3):
            schedule = pipedream(stages, 13, every, vertical_sync=True)
            for stage in range(stages):
                assert versions(schedule, stage) == versions(pipedream(stages, 13, every), 0)


def test_two_buffers() -> None:
    assert listing(pipedream_2bw(2, 7, every=2), transfers=False) == lines("""
        0  F0 F1 B0 F2 B1 U:1 F3 B2 F4:1 B3 U:2 F5:1 B4:1 F6:2 B5:1 U:3 B6:2 U:4
        1  F0 B0 F1 B1 U:1 F2 B2 F3 B3 U:2 F4:1 B4:1 F5:1 B5:1 U:3 F6:2 B6:2 U:4
    """)
    for every in range(3, 6):
        schedule = pipedream_2bw(3, 17, every)
        for stage in range(3):
            assert versions(schedule, stage) == [max(0, microbatch // every - 1) for microbatch in range(17)]


def test_replicas_take_turns_and_reduce_before_they_update() -> None:
    assert listing(pipedream(2, 5, every=2, replicas=(2, 1))) == lines("""
        0  F0 s0> F2 s2> r0< B0 + U:1 F4:1 s4> r2< B2 + U:2 r4< B4:1 + U:3
        1  F1 s1> F3 s3> r1< B1 + U:1 r3< B3 + U:2 + U:3
        2  r0> F0 B0 s0< r1> F1 B1 s1< U:1 r2> F2:1 B2:1 s2< r3> F3:1 B3:1 s3< U:2 r4> F4:2 B4:2 s4< U:3
    """)


@pytest.mark.parametrize("stages", range(1, 7))
def test_a_stage_keeps_as_many_versions_as_the_paper_says(stages: int) -> None:
    for count in range(1, 14):
        to_the_end = tuple(min(count, stages - stage) for stage in range(stages))
        plain = prove(pipedream(stages, count))
        assert plain.activations == to_the_end
        assert all(kept <= most for kept, most in zip(plain.versions, to_the_end, strict=True))
        if count >= 2 * stages:
            assert plain.versions == tuple(stages - stage for stage in range(stages))
        assert max(prove(pipedream(stages, count, vertical_sync=True)).versions) <= stages
        for every in (2, 3, 5):
            assert max(prove(pipedream(stages, count, every)).versions) <= 1 + -(-(stages - 1) // every)
            prove(pipedream(stages, count, every, vertical_sync=True))
        for every in range(stages, stages + 4):
            assert max(prove(pipedream_2bw(stages, count, every)).versions) <= 2


@pytest.mark.parametrize("replicas", REPLICAS, ids=str)
def test_replicated_streams_are_proved(replicas: tuple[int, ...]) -> None:
    for count in range(1, 30):
        for times in (12, 24):
            prove(pipedream(len(replicas), count, times, replicas=replicas))
            prove(pipedream(len(replicas), count, times, vertical_sync=True, replicas=replicas))
            assert max(prove(pipedream_2bw(len(replicas), count, times, replicas=replicas)).versions) <= 2


STREAMS = [
    pipedream_pipeline(3),
    pipedream_pipeline(3, 2, vertical_sync=True),
    pipedream_pipeline(2, 6, replicas=(3, 2)),
    pipedream_2bw_pipeline(3, 4),
]


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_windows_make_the_same_stream_wherever_they_are_cut(stream: AsyncPipeline) -> None:
    whole = joined(window(stream, 0, 13), drain(stream, 13))
    prove(whole)
    for cuts in ([4, 8], [1, 2, 3, 4], [6], [13], [0, 5, 5]):
        ends = [0, *cuts, 13]
        windows = [window(stream, begin, end) for begin, end in pairwise(ends)]
        assert joined(*windows, drain(stream, 13)) == whole


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_microbatches_never_use_older_weights_than_the_one_before(stream: AsyncPipeline) -> None:
    for stage in range(stream.stages):
        used = [stream.version(stage, microbatch) for microbatch in range(40)]
        assert used == sorted(used)


def test_nothing_to_drain() -> None:
    assert drain(pipedream_pipeline(3), 0).workers == ((), (), ())


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_in_the_long_run_workers_do_not_wait(stages: int) -> None:
    for schedule in (pipedream(stages, 40 * stages), pipedream_2bw(stages, 40 * stages, 2 * stages)):
        assert simulate(schedule, Times.equal(stages, 1.0, 0.5, 0.5)).bubble <= 0.05


def test_replicas_of_a_slow_stage_keep_up() -> None:
    times = Times((3.0, 1.0), (1.5, 0.5), (1.5, 0.5), (0.0,), (0.0, 0.0), (0.0, 0.0))
    assert simulate(pipedream(2, 240, 3, replicas=(3, 1)), times).bubble <= 0.05
    assert simulate(pipedream(2, 240, 3), times).bubble >= 0.3


def test_what_cannot_be_streamed() -> None:
    for call, said in [
        (lambda: pipedream(0, 4), "stages of at least 1, not 0"),
        (lambda: pipedream(2, 4, 0), "every of at least 1, not 0"),
        (lambda: pipedream(2, 4, 3, replicas=(2, 1)), "2 replicas of stage 0 cannot share the 3 microbatches"),
        (lambda: pipedream(2, 4, replicas=(1,)), "are for 1 stages, but there are 2"),
        (lambda: pipedream_2bw(4, 8, 3), "4 workers need at least as many microbatches .* not 3"),
        (lambda: window(pipedream_pipeline(2), 4, 3), "end of at least 4, not 3"),
        (lambda: window(pipedream_pipeline(2), -1, 3), "begin of at least 0, not -1"),
        (lambda: drain(pipedream_pipeline(2), -1), "end of at least 0, not -1"),
    ]:
        with pytest.raises(ConfigError, match=said):
            call()
