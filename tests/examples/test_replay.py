"""The example of a replay buffer learns, with the same bits on any number of workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "replay.py"
SCRIPT = f"""
import runpy, sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_replay_buffer_grows_on_any_number_of_workers(run: Run) -> None:
    given, found = ("--iterations", 5, "--save", "weights.pt"), []
    for workers in (1, 3):
        ran = run(SCRIPT, "-n", workers, "--set", "exact=true", arguments=given, name=str(workers))
        assert ran.code == 0, ran.report()
        found.append([line for line in ran.logs["rank-0"].splitlines() if line.startswith(("it", "fi"))])
    assert found[0] == found[1] and len(found[0]) == 6
    lines = [re.fullmatch(r"iteration (.)  (\d+) samples  (\d+) poles fell", line) for line in found[0][:-1]]
    numbers = [[int(number) for number in line.groups()] for line in lines if line]
    assert [samples for _, samples, _ in numbers] == [512, 1024, 1536, 2048, 2560]
    assert 3 * numbers[-1][2] < numbers[0][2]
