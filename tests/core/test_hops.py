"""How many files of the package are on the stack of a real step where it is deepest in ``comm``, if nobody is late."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from fork_server import forked

import paceline
from paceline.testing import processes

pytestmark = pytest.mark.usefixtures("fork_server")
ROOT = Path(paceline.__file__).parent
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "all-reduce": ({}, 8),
    "pipeline": ({"strategy": "pipeline"}, 8),
    "synchronous server": ({"strategy": "parameter-server"}, 9),
}
"""Settings, and the most files; ``docs/design.md`` names these numbers."""


class Stack:
    """Keeps the longest list of files, from the script inwards, with which a function of ``comm`` was called."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(f"{ROOT / 'comm'}/"):
            return
        found: dict[str, None] = {}
        at: FrameType | None = frame
        while at is not None and at.f_code.co_filename != __file__:
            path = Path(at.f_code.co_filename)
            if path.is_relative_to(ROOT):
                found[str(path.relative_to(ROOT))] = None
            at = at.f_back
        if len(found) > len(self.files):
            self.files = list(reversed(found))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@processes(2, start=forked)
def test_files_between_the_script_and_shared_memory(worker: Any, name: str) -> None:
    settings, most = CASES[name]
    files = _deepest(settings)
    assert files[0] == "session.py" and files[-1].startswith("comm/")
    assert len(files) <= most, files


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@processes(2, one_machine=False, start=forked)
def test_files_between_the_script_and_the_network(worker: Any, name: str) -> None:
    settings, most = CASES[name]
    files = _deepest(settings)
    assert len(files) <= most, files


def _deepest(settings: dict[str, Any]) -> list[str]:
    torch.manual_seed(0)
    session = paceline.start(
        model=torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=torch.nn.functional.mse_loss,
        data=torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1)),
        batch=16,
        audit="off",
        **settings,
    )
    found = []
    for batch in session.batches(steps=9):
        stack = Stack()
        sys.setprofile(stack if batch.step > 2 else None)
        session.step(batch)
        sys.setprofile(None)
        if stack.files:
            found.append(stack.files)
    return min(found, key=len)  # where a peer is late, the wait looks at the others' state, which lies deeper
