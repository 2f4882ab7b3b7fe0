"""The trainings of the gallery give the same bits on 1, 2 and 3 workers, and the losses of plain PyTorch."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from fork_server import PACELINE, Command, ForkServer

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
IN_ORDER = Path(__file__).with_name("run_in_order.py")
NAMES = sorted(path.stem.removesuffix("_plain") for path in GALLERY.glob("*_plain.py"))
QUICK = "graph"


def short(script: str) -> str:
    """The script, with three steps in one epoch of each of its trainings, which are printed whatever their number."""
    found = re.sub(r"(epoch in (?:session\.epochs|range))\(\w+\)", r"\1(1)", script)
    found = re.sub(r"% \d+ == \d+:", "% 1 == 0:", found.replace("range(STEPS)", "range(3)"))
    found, batches = re.subn(r"session\.batches\([^)]*\)", "session.batches(steps=3)", found)
    found, loaders = re.subn(r" in loader:", " in __import__('itertools').islice(loader, 3):", found)
    assert batches or loaders or "range(3)" in found
    return found


def output(server: ForkServer, folder: Path, *words: object, **variables: str) -> str:
    out, err = folder / "out", folder / "err"
    command = Command(tuple(map(str, words)), {**os.environ, **variables}, out, err, folder)
    assert server.run(command, 120) == 0, out.read_text() + err.read_text()
    return out.read_text()


def write(name: str, folder: Path) -> Path:
    """The short form of a script, in the folder."""
    script = folder / f"{name}.py"
    script.write_text(short((GALLERY / script.name).read_text(encoding="utf-8")), encoding="utf-8")
    return script


@pytest.mark.slow(turns=8)
@pytest.mark.parametrize("name", NAMES)
def test_the_losses_are_those_of_plain_pytorch(name: str, fork_server: ForkServer, tmp_path: Path) -> None:
    """Of the same samples and random numbers; so that these are the same, a batch is one microbatch."""
    plain = output(fork_server, tmp_path, IN_ORDER, write(f"{name}_plain", tmp_path))
    ours = output(fork_server, tmp_path, write(name, tmp_path), PACELINE_MICROBATCHES="1")
    found, wanted = ([float(one) for one in re.findall(r"loss (\d+\.\d+)", text)] for text in (ours, plain))
    assert wanted and found == pytest.approx(wanted, rel=3e-4)


@pytest.mark.parametrize(
    "name", [one if one == QUICK else pytest.param(one, marks=pytest.mark.slow(turns=8)) for one in NAMES]
)
def test_the_bits_are_those_of_one_process(name: str, fork_server: ForkServer, tmp_path: Path) -> None:
    script, found = write(name, tmp_path), set()
    for workers in (1, 2, 3):
        words = (script,) if workers == 1 else (*PACELINE, "run", "-n", workers, script)
        printed = output(fork_server, tmp_path, *words)
        found |= set(re.findall(r"fingerprint ([0-9a-f]{64})$", printed, re.MULTILINE))
    assert len(found) == 1


def test_each_of_twelve_has_at_most_80_lines_and_a_row() -> None:
    page = (GALLERY.parents[1] / "docs" / "gallery.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)\.py` \|.*\| (\d+), (\d+) \|$", page, re.MULTILINE)
    shown = {name: (int(ours), int(plain)) for name, ours, plain in rows}
    for name in shown:
        ours, plain = (
            (GALLERY.parent / f"{file}.py").read_text(encoding="utf-8").count("\n") for file in (name, f"{name}_plain")
        )
        assert ours <= 80
        assert shown[name] == (ours, plain), name
    assert len(shown) == 12 and {f"gallery/{name}" for name in NAMES} <= shown.keys()
