"""Runs that never were, for what reads their events."""

from pathlib import Path

import event_files as files
import pytest
from async_schedules import pipedream
from event_files import STREAM, TWO, UNEVEN, slower

from paceline.schedule.pipeline.clock import simulate
from paceline.schedule.pipeline.synchronous import one_forward_one_backward


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two stages, three microbatches; the steps 0 to 4, of which the later ones are slower."""
    files.mark(tmp_path, 0, "start", -2.0, strategy="pipeline", workers=2)
    files.mark_cut(tmp_path, TWO)
    for step in range(5):
        timeline = simulate(one_forward_one_backward(2, 3), slower(UNEVEN, 1 + step / 10))
        files.mark_whole(tmp_path, timeline, step, 100.0 * step, 3)
    return tmp_path


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """PipeDream, two stages, four microbatches a step and an update after each two of them; steps 0 to 9."""
    settings = {"schedule": "pipedream", "update_every": 2}
    files.mark_cut(tmp_path, TWO, microbatches=4, pipeline=settings)
    timeline = simulate(pipedream(2, 40, 2), STREAM)
    files.mark_timeline(tmp_path, timeline, 0.0, 0, 4)
    for step in range(10):
        files.mark_step(tmp_path, 2, step, 14.0 * (step + 1))
    return tmp_path
