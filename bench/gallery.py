"""The trainings of the gallery, whole: on one worker and on three, with the curves as a picture.

Each script of ``examples/gallery`` runs on 1 and on 3 workers, which must end with one fingerprint. Its last line goes
into a table, and its losses into ``docs/images/gallery.svg``.

    python bench/gallery.py                # about ten minutes on two cores; needs matplotlib
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
PICTURE = ROOT / "docs" / "images" / "gallery.svg"


def run(name: str, workers: int) -> str:
    """What a script prints on so many workers."""
    words = [sys.executable, str(GALLERY / f"{name}.py")]
    if workers > 1:
        words[1:1] = ["-m", "paceline", "run", "-n", str(workers)]
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{name} on {workers} workers:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


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
    names = sys.argv[1:] or sorted(path.stem for path in GALLERY.glob("*.py"))
    losses = {}
    for name in names:
        alone, three = run(name, 1), run(name, 3)
        assert fingerprint(alone) == fingerprint(three), name
        losses[name] = [float(value) for value in re.findall(r"loss ([0-9.]+)", alone)]
        last = [line for line in alone.splitlines() if not line.startswith("fingerprint")][-1]
        print(f"{name:10} {last:60} {fingerprint(alone)[:8]} on 1 and on 3 workers", flush=True)
    if not sys.argv[1:]:
        draw(losses)


if __name__ == "__main__":
    main()
