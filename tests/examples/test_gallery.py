"""The trainings of the gallery give the same bits on 1, 2 and 3 workers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from fork_server import PACELINE, Command, ForkServer

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
NAMES = sorted(path.stem for path in GALLERY.glob("*.py"))
QUICK = "graph"


def short(script: str) -> str:
    """The script, with three steps in one epoch of each of its sessions."""
    found, epochs = re.subn(r"session\.epochs\(\w+\)", "session.epochs(1)", script)
    found, batches = re.subn(r"session\.batches\([^)]*\)", "session.batches(steps=3)", found)
    assert batches >= max(epochs, 1)
    return found


@pytest.mark.parametrize(
    "name", [one if one == QUICK else pytest.param(one, marks=pytest.mark.slow(turns=8)) for one in NAMES]
)
def test_the_bits_are_those_of_one_process(name: str, fork_server: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    script.write_text(short((GALLERY / script.name).read_text(encoding="utf-8")), encoding="utf-8")
    found = set()
    for workers in (1, 2, 3):
        words = (script,) if workers == 1 else (*PACELINE, "run", "-n", workers, script)
        out, err = tmp_path / "out", tmp_path / "err"
        code = fork_server.run(Command(tuple(map(str, words)), dict(os.environ), out, err, tmp_path), 120)
        assert code == 0, out.read_text() + err.read_text()
        found |= set(re.findall(r"fingerprint ([0-9a-f]{64})$", out.read_text(), re.MULTILINE))
    assert len(found) == 1


def test_each_has_at_most_80_lines_and_a_row() -> None:
    page = (GALLERY.parents[1] / "docs" / "gallery.md").read_text(encoding="utf-8")
    for name in NAMES:
        lines = (GALLERY / f"{name}.py").read_text(encoding="utf-8").count("\n")
        assert lines <= 80
        assert re.search(rf"\| `gallery/{name}\.py` \|.*\| {lines} \|", page), f"{name}.py has {lines} lines"
