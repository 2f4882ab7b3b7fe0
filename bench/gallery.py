"""The trainings of the gallery, whole: on 1, 2 and 3 workers, and in plain PyTorch, with the curves as a picture.

Each script runs with ``exact`` on 1, 2 and 3 workers, which must end with the same bits. It also runs with one
microbatch, beside its twin in plain PyTorch on the same samples and random numbers: the two last values stand side by
side in the table, with the lines of both scripts. Only the rollouts of ``ppo`` draw other random numbers than its twin.
The values go into ``docs/images/gallery.svg``.

    python bench/gallery.py                          # about half an hour on two cores; needs matplotlib
    python bench/gallery.py gpt unet                 # only these, without a picture
    python bench/gallery.py --values FILE gpt unet   # the same; the picture, once FILE has the values of all
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
FOLDERS = {
    **{path.stem.removesuffix("_plain"): path.parent for path in sorted((EXAMPLES / "gallery").glob("*_plain.py"))},
    **dict.fromkeys(("contrastive", "dcgan", "ppo"), EXAMPLES),
}
IN_ORDER = ROOT / "tests" / "examples" / "run_in_order.py"
PICTURE = ROOT / "docs" / "images" / "gallery.svg"
VALUE = {"dcgan": r"loss of G ([0-9.]+)", "ppo": r"([0-9]+) poles fell"}


def run(*words: object, **variables: str) -> tuple[str, str]:
    """What a command of Python prints, and the first letters of its fingerprint, else of the hash of its weights."""
    with tempfile.TemporaryDirectory() as folder:
        given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        command = [sys.executable, *map(str, words)]
        ended = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{command}:\n{ended.stdout}{ended.stderr}")
        if found := re.findall(r"fingerprint ([0-9a-f]{64})$", ended.stdout, re.MULTILINE):
            return ended.stdout, found[-1][:8]
        return ended.stdout, "".join(_hash_of(path) for path in Path(folder).glob("*.pt"))


def _hash_of(path: Path) -> str:
    import torch

    made = hashlib.sha256()
    for name, value in torch.load(path, weights_only=True).items():
        made.update(name.encode() + value.contiguous().numpy().tobytes())
    return made.hexdigest()[:8]


def values_in(name: str, printed: str) -> list[float]:
    return [float(value) for value in re.findall(VALUE.get(name, r"loss ([0-9.]+)"), printed)]


def draw(values: dict[str, list[float]]) -> None:
    """Draw the values of each training over its printed lines."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "paceline", "font.size": 8})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 3, figsize=(7.5, 7.2), layout="constrained")
    for place, name in zip(axes.flat, FOLDERS, strict=True):
        place.plot(range(len(values[name])), values[name], color="#0072b2", marker="o", markersize=2.5)
        place.set_title(f"{name}: {'poles that fell' if name == 'ppo' else 'loss'}")
        place.set_ylim(bottom=0)
    figure.savefig(PICTURE, metadata={"Date": None})


def train(name: str) -> list[float]:
    """Run a training in all ways, and print its row. Return the values that it has printed."""
    script, plain = FOLDERS[name] / f"{name}.py", FOLDERS[name] / f"{name}_plain.py"
    ran = [run(script, PACELINE_EXACT="true")]
    for workers in (2, 3):
        ran.append(run("-m", "paceline", "run", "-n", workers, "--set", "exact=true", script))
    same = " ".join(bits for _, bits in ran)
    assert len(set(same.split())) == 1 and same, f"{name}: {same}"
    one = (run(script, PACELINE_MICROBATCHES="1"), run(IN_ORDER, plain))
    ours, twin = (values_in(name, printed)[-1] for printed, _ in one)
    lines = [path.read_text(encoding="utf-8").count("\n") for path in (script, plain)]
    print(f"{name:12}{lines[0]:5} {lines[1]:7} {ours:10.4f} {twin:7.4f}  {same}", flush=True)
    last = [line for line in ran[0][0].splitlines() if not line.startswith("fingerprint")][-1]
    print(f"{'':12}{last}", flush=True)
    return values_in(name, ran[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *FOLDERS])
    parser.add_argument("--values", type=Path, metavar="FILE", help="JSON file that keeps the values between calls")
    given = parser.parse_args()
    kept = json.loads(given.values.read_text()) if given.values and given.values.exists() else {}
    print("script      lines, plain  last value, plain  bits on 1, 2, 3 workers")
    for name in given.names or FOLDERS:
        kept[name] = train(name)
        if given.values:
            given.values.write_text(json.dumps(kept))
    if kept.keys() >= FOLDERS.keys():
        draw(kept)


if __name__ == "__main__":
    main()
