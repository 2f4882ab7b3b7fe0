"""The examples of collectives by hand do what their page says."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import PACELINE, Command, ForkServer

FOLDER = Path(__file__).parents[2] / "examples" / "collectives"

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(fork_server: ForkServer, tmp_path: Path) -> Run:
    """Runs an example on so many workers; returns the exit code and what all of it says."""

    def running(workers: int, name: str, *arguments: str, **variables: str) -> tuple[int, str]:
        out, err = tmp_path / "out", tmp_path / "err"
        words = (*PACELINE, "run", "-n", str(workers), str(FOLDER / name), *arguments)
        code = fork_server.run(Command(words, os.environ | variables, out, err, tmp_path), 120)
        return code, out.read_text() + err.read_text()

    return running


@pytest.mark.parametrize(
    ("workers", "name", "says"),
    [
        (2, "rank_and_size.py", ["rank 0 of 2"]),
        (3, "send_and_receive.py", ["the token was counted 3 times", "rank 0 got 2"]),
        (
            3,
            "operations.py",
            [
                r"broadcast +\[1\] \[1\] \[1\]",
                r"reduce +\[6\] \[\] \[\]",
                r"all_reduce +\[6\] \[6\] \[6\]",
                r"gather +\[1, 2, 3\] \[\] \[\]",
                r"all_gather +\[1, 2, 3\] \[1, 2, 3\] \[1, 2, 3\]",
                r"scatter +\[0\] \[10\] \[20\]",
                r"reduce_scatter +\[3\] \[33\] \[63\]",
                r"all_to_all +\[0, 10, 20\] \[1, 11, 21\] \[2, 12, 22\]",
            ],
        ),
        (3, "ring.py", [r"largest difference \d\.\de-0[67]", "by the library"]),
        (3, "partition.py", ["each sample was seen once: True", r"the models are 0\.[0-9]*[1-9]"]),
        (3, "averaging.py", [r"(0\.0e\+00|\de-0[678]) from the model of one process"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.promise("docs/collectives.md", "What each has afterwards, on three ranks that begin with 1, 2, 3:")
def test_example(run: Run, workers: int, name: str, says: list[str]) -> None:
    code, said = run(workers, name, *(["--elements", "10007"] if name == "ring.py" else []))
    assert code == 0, said
    for expected in says:
        assert re.search(expected, said), (expected, said)


@pytest.mark.slow
def test_with_the_session(run: Run) -> None:
    """The same bits on any number of workers."""
    found = set()
    for workers in (1, 3):
        code, said = run(workers, "with_session.py")
        assert code == 0, said
        found.update(re.findall(r"fingerprint ([0-9a-f]{64})", said))
    assert len(found) == 1


@pytest.mark.promise(
    "docs/collective-calls.md",
    "Paceline compares the calls and raises a `DisagreementError` instead, before the next update",
)
@pytest.mark.promise(
    "docs/collectives.md",
    "the run ends at once with exit code 3, and the error names what each rank called, and in which line.",
)
def test_a_collective_that_one_rank_leaves_out(run: Run) -> None:
    code, said = run(2, "with_session.py", FORGET="1")
    assert code == 3, said
    assert "all_reduce" in said and "with_session.py:" in said and "rank 1" in said


@pytest.mark.slow
def test_speedup(fork_server: ForkServer, tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    words = (str(FOLDER / "speedup.py"), "--most", "2", "--steps", "3")
    code = fork_server.run(Command(words, dict(os.environ), out, err, tmp_path), 120)
    assert code == 0, err.read_text()
    assert re.search(r"1 processes: \d+ samples/s, 1\.00 times one\n2 processes: \d+", out.read_text())
