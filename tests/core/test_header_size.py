"""The header of a step has room for the share of a worker, not for all microbatches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.comm.collectives.step_header import header_bytes

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import os
from subjects import *
from paceline.comm.collectives.all_gather import AllGather
from paceline.comm.collectives.step_header import HEADER_TAG

sent = set()
start = AllGather.start

def recorded(self, own):
    if self._tag == HEADER_TAG:
        sent.add(own.nbytes)
    return start(self, own)

AllGather.start = recorded
session = paceline.start(**CASES["batch norm, dropout, short batch"]() | eval(os.environ["GIVEN"]))
for batch in session.batches(epochs=1):
    session.step(batch)
tell(sent=sorted(sent), fingerprint=session.fingerprint())
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("machines", [(3,), (1, 2)], ids=str)
@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"microbatches": 8, "exact": True}, 3),
        ({"microbatches": 32, "exact": True}, 11),
        ({"microbatches": 8, "strategy": "pipeline", "exact": True}, 8),
    ],
    ids=["8 shared out to 3", "32 shared out to 3", "8 on the last stage"],
)
def test_a_header_has_room_for_the_share(
    printed: Printed, tmp_path: Path, given: dict[str, Any], most: int, machines: tuple[int, ...]
) -> None:
    everyone = printed(SCRIPT, 3, tmp_path, machines=machines, environment={"GIVEN": repr(given)})
    assert [one["sent"] for one in everyone] == [[header_bytes(most)]] * 3
    assert len({one["fingerprint"] for one in everyone}) == 1
