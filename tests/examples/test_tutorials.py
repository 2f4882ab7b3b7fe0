"""The scripts of the tutorials show what their pages claim."""

from __future__ import annotations

import importlib
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
    """Run a tutorial on so many workers, or with 0 as a plain script; return what it prints.

    What a plain script launches is forked.
    """

    def running(workers: int, name: str, *arguments: object, options: tuple[str, ...] = (), **variables: str) -> str:
        out, err = tmp_path / "out", tmp_path / "err"
        if workers:
            start = [*PACELINE, "run", "-n", str(workers), *options, str(FOLDER / name)]
        else:
            copy = tmp_path / name
            copy.write_text("import fork_server; fork_server.fork_workers()\n" + (FOLDER / name).read_text())
            start = [str(copy)]
        words = [*start, *map(str, arguments)]
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
    shown = r"^1 workers, 32 steps, loss ([0-9.]+)\nfingerprint ([0-9a-f]+)$"
    of_page = re.findall(shown, (PAGES / "first.md").read_text(), re.MULTILINE)[-1]
    ((loss, bits),) = re.findall(shown, alone, re.MULTILINE)
    assert float(loss) == pytest.approx(float(of_page[0]), abs=1e-3)
    if loss == of_page[0]:  # all digits of it: other processors round differently
        assert bits == of_page[1] and bits in (PAGES / "cluster.md").read_text()


def stealing_has_the_bits_of_waiting(run: Run, _: Path) -> None:
    printed = run(4, "slow_worker.py", "--epochs", 1, "--milliseconds", 2)
    rows = re.findall(r"^\[rank 0\] (.+?)  +[0-9.]+ s   loss ([0-9.]+)", printed, re.MULTILINE)
    assert [name for name, _ in rows] == ["allreduce", "stealing", "backup", "server, async", "hogwild"]
    synchronous, stolen, *others = fingerprints(printed)
    assert stolen == synchronous and synchronous not in others
    assert all(float(loss) < 1.609 for _, loss in rows), "no better than a guess among five classes"


def the_rate_follows_the_batch_up_to_an_end(run: Run, _: Path) -> None:
    printed = run(0, "learning_rate.py")
    alone = float(re.findall(r"^1 worker: ([0-9.]+)$", printed, re.MULTILINE)[0])
    rows = re.findall(r"^(\D+?) +([0-9.]+) +([0-9.]+) +([0-9.]+)$", printed, re.MULTILINE)[1:]
    none, root, linear, warm = ([float(loss) for loss in losses] for _, *losses in rows)
    assert alone < linear[0] < root[0] < none[0] and linear[0] < alone + 0.02
    assert warm[1] < linear[1] < root[1] < none[1]
    assert linear[2] > 1.609 > warm[2], "a guess among five classes"
    for row, options in (linear, ()), (warm, ("--set", "warmup_steps=32")):
        assert f"linear: {row[0]:.4f}" in run(4, "learning_rate.py", "--real", options=options)


def what_is_divided_and_what_is_kept(run: Run, _: Path) -> None:
    """The drawings, the counted bytes and the bits of all ways; the page has the same output."""
    printed = run(4, "too_large.py").replace("[rank 0] ", "")
    page = (PAGES / "too-large.md").read_text()
    assert [line for line in printed.splitlines() if line.strip() and line.rstrip()[:-10] not in page] == []
    rows = re.findall(r"^(.+?) +state +([0-9,]+) +activations +([0-9,]+) +(\w+)$", printed, re.MULTILINE)
    assert len({bits for *_, bits in rows}) == 1
    state, kept = ({row[0]: int(row[column].replace(",", "")) for row in rows} for column in (1, 2))
    assert 4 * state["sharded"] == 4 * state["pipeline, gpipe"] == state["allreduce"]
    assert 4 * kept["pipeline, gpipe"] == 6 * kept["pipeline, 1f1b"]
    assert kept["allreduce, recomputed"] < kept["allreduce"] / 7


def fewer_bytes(run: Run, _: Path) -> None:
    printed = run(0, "slow_network.py", "--epochs", 2)
    rows = re.findall(r"^(.+?) +([0-9.]+) MB   loss ([0-9.]+)   fingerprint", printed, re.MULTILINE)
    sent, loss = ({row[0]: float(row[column]) for row in rows} for column in (1, 2))
    full = sent["float32"]
    assert [round(full / sent[name]) for name in ("bfloat16", "fp8-e4m3", "diloco, 8", "diloco, 32")] == [2, 4, 8, 32]
    assert max(loss[name] for name in ("bfloat16", "int8", "fp8-e4m3")) < loss["float32"] + 0.01
    assert min(loss["topk"], loss["diloco, 8"], loss["diloco, 32"]) > loss["float32"] + 0.01


def workers_that_die_change_no_bit(run: Run, tmp_path: Path) -> None:
    undisturbed = run(0, "spot.py", "--epochs", 8)
    killed = run(3, "spot.py", "--life", 6, "--epochs", 8, options=("--elastic", "1:3"))
    assert re.search("[0-9]+ workers were lost on the way", (tmp_path / "err").read_text())
    assert fingerprints(killed) == fingerprints(undisturbed)


def test_amdahls_law_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers share 8 microbatches unequally: they take as long as 3 of 8."""
    monkeypatch.syspath_prepend(FOLDER)
    seconds = [0.02 + 0.16 * share for share in (1, 1 / 2, 3 / 8, 1 / 4)]
    assert importlib.import_module("speedup").amdahl([1, 2, 3, 4], seconds) == pytest.approx([0.02, 0.16], rel=1e-4)


def speed_up_is_measured_and_fitted(run: Run, _: Path) -> None:
    printed = run(0, "speedup.py", "--most", 2, "--steps", 2)
    assert re.findall(r"^(\d) workers: [0-9.]+ s, speed-up", printed, re.MULTILINE) == ["1", "2"]
    assert "1 workers" in printed and "speed-up 1.00, efficiency 100%" in printed and "serial" in printed


LESSONS = (
    stealing_has_the_bits_of_waiting,
    the_rate_follows_the_batch_up_to_an_end,
    what_is_divided_and_what_is_kept,
    fewer_bytes,
    workers_that_die_change_no_bit,
    speed_up_is_measured_and_fitted,
)


@pytest.mark.slow
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.__name__)
def test_a_lesson(lesson: Callable[[Run, Path], None], run: Run, tmp_path: Path) -> None:
    lesson(run, tmp_path)


def test_scripts_are_short_and_on_a_page() -> None:
    pages = "".join(page.read_text() for page in PAGES.glob("*.md"))
    for script in FOLDER.glob("*.py"):
        assert len(script.read_text().splitlines()) <= 80, script.name
        assert script.name in pages, script.name
    assert all(len(page.read_text().split()) <= 900 for page in PAGES.glob("*.md"))
