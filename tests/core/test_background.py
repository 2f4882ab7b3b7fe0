"""However a run ends, a save under way in the background is finished, and its error is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.testing.ranks import Ended

Run = Callable[..., list[Ended]]
Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import os, sys, time
from paceline.checkpoint import files
from paceline.training import setup
from subjects import *

write = files.write_part

def slow(*arguments):
    print("writing", flush=True)
    time.sleep(3600 if "HANG" in os.environ else 0.3)
    if "FAIL" in os.environ:
        raise OSError(28, "the disk is gone")
    return write(*arguments)

files.write_part = slow
setup._LAST_SAVE_SECONDS = 0.2 if "HANG" in os.environ else 60
given = CASES["batch norm, dropout, short batch"]()
session = paceline.start(**given, exact=True, checkpoint={"directory": os.environ["SAVED"], "every": 4})
for batch in session.batches(steps=4):
    session.step(batch)
tell(fingerprint=session.fingerprint())
"""
ENDS = {
    "the end": ("", 0),
    "an exit": ("sys.exit(3)", 3),
    "an error": ("raise RuntimeError('of the script')", 1),
    "an interrupt": ("raise KeyboardInterrupt", -2),
}
RESUMING = """
import os
from subjects import *
given = CASES["batch norm, dropout, short batch"]()
session = paceline.start(**given, exact=True, checkpoint=os.environ["SAVED"], resume="auto")
tell(position=session.position, fingerprint=session.fingerprint())
"""
AUTO = """
import os
from subjects import *
given = CASES["batch norm, dropout, short batch"]()
saving = {"directory": os.environ["SAVED"], "every": "auto", "keep": 99}
session = paceline.start(**given, exact=True, checkpoint=saving)
for batch in session.batches(steps=14):
    session.step(batch)
tell(position=session.position)
"""


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, str]:
    return {"SAVED": str(tmp_path / "saved")}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("end", ENDS)
def test_the_last_save_is_finished(ranks: Run, printed: Printed, tmp_path: Path, saved: Any, end: str) -> None:
    line, code = ENDS[end]
    (one,) = ranks(SCRIPT + line, 1, tmp_path, environment=saved)
    assert one.code == code, one.err
    assert ("of the script" in one.err) == (end == "an error")
    (found,) = printed(RESUMING, 1, tmp_path, environment=saved)
    assert found["position"] == 4 and found["fingerprint"] in one.out


@pytest.mark.parametrize("end", ["the end", "an exit"])
def test_the_error_of_the_last_save_is_told(ranks: Run, tmp_path: Path, saved: Any, end: str) -> None:
    (one,) = ranks(SCRIPT + ENDS[end][0], 1, tmp_path, environment=saved | {"FAIL": "1"})
    assert one.code == 4
    assert one.err.startswith("paceline: CheckpointError: The checkpoint of step 4 could not be written")
    assert one.err.count("the disk is gone") == 1


def test_a_failed_process_does_not_wait_without_end(ranks: Run, tmp_path: Path, saved: Any) -> None:
    (one,) = ranks(SCRIPT + ENDS["an error"][0], 1, tmp_path, environment=saved | {"HANG": "1"})
    assert one.code == 1 and "of the script" in one.err


def test_every_auto_on_workers_whose_clocks_differ(printed: Printed, tmp_path: Path, saved: Any) -> None:
    ends = printed(AUTO, 2, tmp_path, environment=saved)
    assert [one["position"] for one in ends] == [14, 14]
    assert (tmp_path / "saved" / "step-000010").is_dir()
