"""Draw every figure of the pages again. The figures of bench/stragglers take hours, the others minutes.

    python bench/figures.py                             # all
    python bench/figures.py speedup.svg gallery.svg     # these

``dashboard.png`` is not among them: a browser's picture of ``paceline dashboard``, taken by hand.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
BY_HAND = {"dashboard.png"}
_RUN = "-m paceline run --quiet --runs-dir {folder} -n 4"
_STRAGGLERS = "bench/stragglers {} --strategies all --output {{folder}}"
_TASK = _STRAGGLERS.format("task --models mlp,conv --seeds 5")
FIGURES = {
    "gallery.svg": "bench/gallery.py",
    "which-strategy.svg": "bench/plan/maps.py",
    "learning-rate.svg": "examples/tutorials/learning_rate.py --plot {figure}",
    "slow-network.svg": "examples/tutorials/slow_network.py --plot {figure}",
    "slow-worker.svg": f"{_RUN} examples/tutorials/slow_worker.py --plot {{figure}}",
    **{f"recording-{name}.svg": f"bench/recordings.py {name}" for name in ("demo", "kill", "plan", "straggler", "why")},
    "speedup.svg": "examples/tutorials/speedup.py --plot {figure}",
    "step-time.png": _STRAGGLERS.format("steps overhead exact --base 0.025 --steps 24"),
    "task-conv.png": _TASK,
    "task-mlp.png": _TASK,
}
"""Arguments of Python, by the figure. ``folder``: for files on the way, which may hold the figure afterwards."""


def main(names: list[str]) -> None:
    wanted, drawn = names or [*FIGURES], dict[str, Path]()
    if unknown := set(wanted) - FIGURES.keys():
        sys.exit(f"There is no figure {', '.join(sorted(unknown))}. The figures are {', '.join(FIGURES)}.")
    with tempfile.TemporaryDirectory() as scratch:
        for name in wanted:
            command = FIGURES[name]
            folder = drawn.setdefault(command, Path(scratch, f"{len(drawn)}"))
            if not folder.exists():
                folder.mkdir()
                words = shlex.split(command.format(figure=IMAGES / name, folder=folder))
                print(f"{name}: python {shlex.join(words)}", flush=True)
                subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
            if (folder / name).exists():
                shutil.copy(folder / name, IMAGES / name)


if __name__ == "__main__":
    main(sys.argv[1:])
