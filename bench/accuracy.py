"""What the examples reach with their default settings: accuracy on MNIST, loss on Tiny Shakespeare.

Both run as a user would run them, under ``paceline run``. An example whose data is not there is left out.

    python bench/accuracy.py                     # data in ../shared/data beside the repository
    python bench/accuracy.py path/to/data        # a folder with mnist/ and tinyshakespeare/input.txt
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """An example, its data under the data folder, its workers, and the figure that it should reach."""

    script: str
    data: str
    workers: int
    figure: str
    goal: str


CASES = (
    Case("convnet.py", "mnist", 4, "test accuracy", "97.5 % or more"),
    Case("gpt.py", "tinyshakespeare/input.txt", 2, "validation loss", "below 2.0"),
)


def measure(case: Case, data: Path, runs: str) -> str:
    """Run an example to its end; gives a line with its last figure and its time.

    Raises:
        SystemExit: the example failed or did not print its figure.
    """
    words = ["-m", "paceline.cli.main", "run", "--quiet", "--runs-dir", runs, "-n", str(case.workers)]
    begin = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, *words, str(ROOT / "examples" / case.script), str(data / case.data)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds = time.perf_counter() - begin
    figures = re.findall(rf"{case.figure} (\S+)", ended.stdout)
    if ended.returncode != 0 or not figures:
        sys.exit(f"{case.script} ended with {ended.returncode}:\n{ended.stdout}")
    return f"{case.script:<12} {case.workers} workers  {case.figure} {figures[-1]} (goal: {case.goal})  {seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=ROOT.parent / "shared" / "data")
    data = parser.parse_args().data.resolve()
    with tempfile.TemporaryDirectory(prefix="paceline-accuracy-") as runs:
        for case in CASES:
            if (data / case.data).exists():
                print(measure(case, data, runs), flush=True)
            else:
                print(f"{case.script:<12} left out: there is no {case.data} in {data}")


if __name__ == "__main__":
    main()
