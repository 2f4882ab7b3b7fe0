"""What each worker writes, reads and hashes when a run saves and when it resumes, on 1, 2 and 4 workers.

Written and read are what the kernel counted for the process (/proc/self/io), hashed what went into SHA-256, the most of
any worker; the seconds are those of the slowest. The state is that of AdamW.

    python bench/checkpoint_parts.py
    PYTHONPATH=/another/tree python bench/checkpoint_parts.py      # with the paceline there
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path

from paceline.testing.ranks import run

SAVE = """
import hashlib, json, os, time
from functools import partial
from pathlib import Path

hashed, sha256 = [0], hashlib.sha256

class Counted:
    def __init__(self, data=b"", **options):
        self._inner = sha256(**options)
        self.update(data)
    def update(self, data):
        hashed[0] += memoryview(data).nbytes
        self._inner.update(data)
    def __getattr__(self, name):
        return getattr(self._inner, name)

import torch
import paceline
hashlib.sha256 = Counted

def counts():
    words = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return time.perf_counter(), int(words["wchar"]), int(words["rchar"]), hashed[0]

def start(resume):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(int(os.environ["LAYERS"]))])
    return paceline.start(
        model=model, optimizer=partial(torch.optim.AdamW, lr=1e-4), loss=torch.nn.functional.mse_loss,
        data=torch.utils.data.TensorDataset(torch.randn(64, 1024), torch.randn(64, 1024)), batch=16,
        checkpoint={"directory": os.environ["SAVED"]}, resume=resume, timeout_seconds=120,
    )

session = start(None)
for batch in session.batches(steps=1):
    session.step(batch)
before = counts()
session.save()
session._loop._checkpointer.finish()
saved = [b - a for a, b in zip(before, counts())]
print(json.dumps({"saved": saved}))
"""
RESUME = (
    SAVE.partition("session = start(None)")[0]
    + """
import paceline.session
from paceline.checkpoint.checkpointer import Checkpointer
inner, found = Checkpointer.resume, []
def resume(*arguments):
    before = counts()
    step = inner(*arguments)
    found.append([b - a for a, b in zip(before, counts())])
    return step
Checkpointer.resume = resume
start("auto")
print(json.dumps({"resumed": found[0]}))
"""
)


def one(script: str, key: str, workers: int, folder: Path, layers: int) -> list[float]:
    """The seconds and bytes of the worker that has the most of each."""
    environment = {"SAVED": str(folder / "saved"), "LAYERS": str(layers)}
    ended = run(script, workers, folder, environment=environment, deadline=600)
    assert [process.code for process in ended] == [0] * workers, "\n".join(process.err for process in ended)
    found = [json.loads(process.out.splitlines()[-1])[key] for process in ended]
    return [max(column) for column in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200, help="size of the state (200)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="numbers of workers (1 2 4)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds for the medians (3)")
    given = parser.parse_args()
    layers = max(1, round(given.megabytes * 1e6 / 3 / 4 / 1024**2))
    print("workers  save: seconds, MB written, MB hashed   resume: seconds, MB read, MB hashed", flush=True)
    for workers in given.workers:
        rows = []
        for _ in range(given.rounds):
            folder = Path(tempfile.mkdtemp(prefix="paceline-parts-"))
            try:
                saved = one(SAVE, "saved", workers, folder, layers)
                resumed = one(RESUME, "resumed", workers, folder, layers)
            finally:
                shutil.rmtree(folder)
            rows.append([saved[0], saved[1] / 1e6, saved[3] / 1e6, resumed[0], resumed[2] / 1e6, resumed[3] / 1e6])
        middle = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"{workers:7d}  " + "  ".join(f"{value:8.2f}" for value in middle), flush=True)


if __name__ == "__main__":
    main()
