"""The settings of a pipeline make a schedule that fits the workers, or are refused with the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.schedule.pipeline.choice import Shape, async_pipeline_for, shape_of, synchronous_schedule
from paceline.schedule.pipeline.operations import Kind
from paceline.settings import PipelineSettings


def settings(schedule: str = "1f1b", **given: Any) -> PipelineSettings:
    return PipelineSettings(schedule=schedule, **given)


@pytest.mark.parametrize(
    ("given", "workers", "shape"),
    [
        ({}, 3, Shape(3, 1, (1, 1, 1))),
        ({"stages": 2}, 6, Shape(2, 1, (3, 3))),
        ({"stages": 2}, 3, Shape(2, 1, (2, 1))),
        ({"cut": ["b"]}, 2, Shape(2, 1, (1, 1))),
        ({"cut": []}, 2, Shape(1, 1, (2,))),
        ({"replicas": [1, 3]}, 4, Shape(2, 1, (1, 3))),
        ({"stages": 2}, 3, Shape(2, 1, (2, 1))),
        ({"schedule": "interleaved"}, 2, Shape(4, 2, (1, 1, 1, 1))),
        ({"schedule": "interleaved", "chunks": 3, "stages": 6}, 4, Shape(6, 3, (2,) * 6)),
        ({"schedule": "zb-v", "stages": 4}, 4, Shape(4, 2, (2,) * 4)),
        ({"schedule": "zb-v", "replicas": [2, 2]}, 2, Shape(2, 2, (2, 2))),
    ],
)
def test_the_shape(given: dict[str, Any], workers: int, shape: Shape) -> None:
    assert shape_of(settings(**given), workers) == shape


@pytest.mark.parametrize(
    ("given", "workers", "words"),
    [
        ({"stages": 2, "schedule": "zb-h1"}, 3, ["3 workers", "2 stages", "multiple of 2", "pipeline.replicas"]),
        ({"stages": 4}, 3, ["3 workers", "4 stages", "multiple of 4", "pipeline.replicas"]),
        ({"stages": 3, "cut": ["b"]}, 2, ["pipeline.stages (3)", "pipeline.cut", "(2)"]),
        ({"stages": 3, "replicas": [1, 1]}, 2, ["pipeline.stages (3)", "pipeline.replicas", "(2)"]),
        ({"replicas": [1, 2]}, 4, ["[1, 2]", "3 workers", "there are 4"]),
        ({"replicas": [1, 2], "schedule": "zb-h1"}, 3, ["[1, 2]", "'zb-h1'", "'1f1b'"]),
        ({"schedule": "interleaved", "replicas": [2, 2, 2]}, 3, ["3 stages", "multiple of 2", "'interleaved'"]),
        ({"schedule": "interleaved", "chunks": 1}, 2, ["pipeline.chunks = 1", "'1f1b'"]),
        ({"schedule": "interleaved", "stages": 3}, 2, ["3 stages", "multiple of 2", "'interleaved'"]),
        ({"schedule": "zb-v", "stages": 3}, 3, ["3 stages", "multiple of 2", "'zb-v'"]),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], workers: int, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        shape_of(settings(**given), workers)
    for word in words:
        assert word in str(error.value)


def test_asynchronous_updates_need_whole_turns() -> None:
    assert async_pipeline_for(settings("pipedream"), 3, 8).every == 8
    assert async_pipeline_for(settings("pipedream", update_every=1), 3, 8).every == 1
    with pytest.raises(ConfigError, match=r"\[1, 3\].* 8 microbatches .*multiple of 3"):
        async_pipeline_for(settings("pipedream", replicas=[1, 3]), 4, 8)
    with pytest.raises(ConfigError, match="2 replicas of stage 0 cannot share the 3 microbatches"):
        async_pipeline_for(settings("pipedream", replicas=[2, 1], update_every=3), 3, 8)
    with pytest.raises(ConfigError, match=r"3 workers need at least as many .*, not 2"):
        async_pipeline_for(settings("2bw", update_every=2), 3, 8)


SHORT = [
    ("1f1b", {"stages": 2}, 6),
    ("gpipe", {"replicas": [1, 3]}, 4),
    ("1f1b", {"replicas": [2, 1, 3]}, 6),
    ("zb-h1", {"stages": 2}, 8),
    ("zb-v", {"stages": 4}, 6),
    ("interleaved", {"stages": 4}, 6),
    ("layerwise", {"stages": 1}, 3),
]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
@pytest.mark.parametrize(("name", "given", "workers"), SHORT, ids=str)
def test_each_microbatch_of_a_short_batch_is_done_where_its_stage_is(
    name: str, given: dict[str, Any], workers: int, microbatches: int
) -> None:
    """There may be fewer microbatches than workers of a stage."""
    whole = synchronous_schedule(settings(name, **given), workers, 8)
    short = synchronous_schedule(settings(name, **given), workers, microbatches)
    assert len(short.workers) == workers
    done = [(one.stage, one.microbatch) for order in short.workers for one in order if one.kind is Kind.FORWARD]
    assert sorted(done) == [(stage, one) for stage in range(short.stages) for one in range(microbatches)]
    for stage, microbatch in done:
        assert short.worker_of(stage, microbatch) in whole.workers_of(stage)
