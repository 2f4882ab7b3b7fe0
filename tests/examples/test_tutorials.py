"""The scripts of the tutorials show what their pages claim."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import PACELINE, Command, ForkServer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "tutorials"
PAGES = ROOT / "docs" / "tutorials"

Run = Callable[..., str]


@pytest.fixture
def run(fork_server: ForkServer, tmp_path: Path) -> Run:
    """Runs a tutorial on so many workers, or with 0 as a plain script; returns what it prints."""

    def running(workers: int, name: str, *arguments: object, options: tuple[str, ...] = (), **variables: str) -> str:
        out, err = tmp_path / "out", tmp_path / "err"
        words = [str(FOLDER / name), *map(str, arguments)]
        if workers:
            words = [*PACELINE, "run", "-n", str(workers), *options, *words]
        code = fork_server.run(Command(tuple(words), os.environ | variables, out, err, tmp_path), 120)
        assert code == 0, out.read_text() + err.read_text()
        return out.read_text()

    return running


def fingerprints(output: str) -> list[str]:
    return re.findall(r"fingerprint ([0-9a-f]+)", output)


def test_one_process_and_three_have_the_same_bits(run: Run) -> None:
    alone = run(0, "first.py", PACELINE_EXACT="true")
    together = run(3, "first.py", options=("--set", "exact=true"))
    assert together.startswith("[rank 0] 3 workers, 32 steps")
    assert len(fingerprints(alone)) == 1 and fingerprints(together) == fingerprints(alone)


def test_scripts_are_short_and_on_a_page() -> None:
    pages = "".join(page.read_text() for page in PAGES.glob("*.md"))
    for script in FOLDER.glob("*.py"):
        assert len(script.read_text().splitlines()) <= 80, script.name
        assert script.name in pages, script.name
    assert all(len(page.read_text().split()) <= 900 for page in PAGES.glob("*.md"))
