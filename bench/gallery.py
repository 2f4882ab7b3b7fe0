"""The trainings of the gallery, whole: on 1, 2 and 3 workers, and in plain PyTorch, with the curves as a picture.

Each script of ``examples/gallery`` runs on 1, 2 and 3 workers, which must end with one fingerprint. It also runs with
one microbatch, beside its twin in plain PyTorch on the same samples and random numbers: the two last losses stand side
by side in the table, with the lines of both scripts. Its losses go into ``docs/images/gallery.svg``.

    python bench/gallery.py                # about twenty minutes on two cores; needs matplotlib
    python bench/gallery.py gpt unet       # only these, without a picture
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GALLERY = ROOT / "examples" / "gallery"
IN_ORDER = ROOT / "tests" / "examples" / "run_in_order.py"
PICTURE = ROOT / "docs" / "images" / "gallery.svg"


def run(*words: object, **variables: str) -> str:
    """What a command of Python prints."""
    with tempfile.TemporaryDirectory() as folder:
        given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        command = [sys.executable, *map(str, words)]
        ended = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{command}:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def losses_in(printed: str) -> list[float]:
    return [float(value) for value in re.findall(r"loss ([0-9.]+)", printed)]


def fingerprint(printed: str) -> str:
    return re.findall(r"fingerprint ([0-9a-f]{64})$", printed, re.MULTILINE)[-1]


def draw(losses: dict[str, list[float]]) -> None:
    """Draw the losses of each training over its printed lines."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "paceline", "font.size": 8})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 3, figsize=(7.5, 5.4), layout="constrained")
    for place, (name, values) in zip(axes.flat, losses.items(), strict=True):
        place.plot(range(len(values)), values, color="#0072b2", marker="o", markersize=2.5)
        place.set_title(f"{name}: loss")
        place.set_ylim(bottom=0)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    names = sys.argv[1:] or sorted(path.stem.removesuffix("_plain") for path in GALLERY.glob("*_plain.py"))
    losses = {}
    print("script      lines, plain  last loss, plain  fingerprint on 1, 2, 3 workers")
    for name in names:
        script, plain = GALLERY / f"{name}.py", GALLERY / f"{name}_plain.py"
        many = [run("-m", "paceline", "run", "-n", workers, script) for workers in (2, 3)]
        printed = [run(script), *many]
        same = " ".join(fingerprint(one)[:8] for one in printed)
        assert len(set(same.split())) == 1, f"{name}: {same}"
        losses[name] = losses_in(printed[0])
        ours, twin = (losses_in(one)[-1] for one in (run(script, PACELINE_MICROBATCHES="1"), run(IN_ORDER, plain)))
        lines = [path.read_text(encoding="utf-8").count("\n") for path in (script, plain)]
        print(f"{name:12}{lines[0]:5} {lines[1]:7} {ours:10.4f} {twin:7.4f}  {same}", flush=True)
        last = [line for line in printed[0].splitlines() if not line.startswith("fingerprint")][-1]
        print(f"{'':12}{last}", flush=True)
    if not sys.argv[1:]:
        draw(losses)


if __name__ == "__main__":
    main()
