"""What it costs to be ready for a loss when there is none: the same run, elastic with a standby, and fixed.

Four workers take steps of about 20 ms, most of it asleep, so that two cores are enough. Fixed and elastic runs take
turns; printed is the median over the rounds of the ratio of their median step times.

    python bench/elastic.py [ROUNDS]
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WORKERS, STEPS = 4, 500
SCRIPT = f"""
import time
from functools import partial
import torch
import paceline

torch.manual_seed(0)
inputs = torch.randn(1024, 32)

def forward(model, batch):
    time.sleep(0.008)
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

session = paceline.start(
    model=torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 4)),
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    forward=forward,
    data=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)),
    batch=64,
    exact=True,
)
for batch in session.batches(steps={STEPS}):
    session.step(batch)
"""


def seconds_of_step(folder: Path, name: str, options: list[str]) -> float:
    """The median time of a step of a run."""
    command = [
        str(Path(sys.executable).with_name("paceline")),
        "run",
        "-n",
        str(WORKERS),
        "--name",
        name,
        "--quiet",
        *options,
    ]
    subprocess.run([*command, "train.py"], cwd=folder, check=True, timeout=300)
    lines = (folder / "runs" / name / "events" / "rank-0.jsonl").read_text().splitlines()
    times = [record["time"] for record in map(json.loads, lines) if record["event"] == "step"][STEPS // 5 :]
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "train.py").write_text(SCRIPT)
        for place in range(rounds):
            fixed = seconds_of_step(folder, f"fixed-{place}", [])
            elastic = seconds_of_step(folder, f"elastic-{place}", ["--elastic", f"2:{WORKERS}", "--standby", "1"])
            ratios.append(elastic / fixed)
            print(f"step: fixed {1e3 * fixed:.2f} ms, elastic {1e3 * elastic:.2f} ms, ratio {ratios[-1]:.4f}")
    print(f"elastic / fixed, median of {rounds} rounds: {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    main()
