"""One worker of the run of many: a tiny model, each microbatch takes a while without computing, and one is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import paceline

STEPS, KILLED_AT = 8, 4
FOLDER, BATCH, SECONDS = Path(sys.argv[1]), int(sys.argv[2]), 0.02


class Slow(nn.Module):
    """A layer that takes its time, as a large one would, but no core."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        return self.layer(value)


def held() -> dict[str, int]:
    """Return the descriptors of this process by kind, its threads, and its private memory."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # that of the listing itself
            continue
    kinds = {"sockets": "socket:", "arenas": "/memfd:", "processes": "anon_inode:[pidfd]"}
    found = {kind: sum(link.startswith(start) for link in links) for kind, start in kinds.items()}
    found["descriptors"] = sum(link != "/dev/null" for link in links)
    rows = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {
        **found,
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "private_kb": int(rows["Private_Dirty"].split()[0]) + int(rows["Private_Clean"].split()[0]),
    }


torch.manual_seed(0)
torch.set_num_threads(1)
samples = torch.randn(BATCH * 4, 16, generator=torch.Generator().manual_seed(1))
session = paceline.start(
    model=Slow(),
    optimizer=lambda values: torch.optim.SGD(values, lr=0.01),
    loss=nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(samples, samples.flip(0)),
    batch=BATCH,
    microbatches=BATCH,
    exact=True,
)
first, last = session.workers, []
for batch in session.batches(steps=STEPS):
    begin = time.perf_counter()
    report = session.step(batch)
    last.append(time.perf_counter() - begin)
    if report.step == KILLED_AT and session.rank == first // 2 + 1 and session.workers == first:
        os.kill(os.getpid(), signal.SIGKILL)
until = time.monotonic() + 10
while held()["sockets"] > BATCH + 4 and time.monotonic() < until:  # gloo closes the old group's one by one
    time.sleep(0.01)
told = {"steps": last, "size": session.workers, "first": first, "fingerprint": session.fingerprint(), **held()}
(FOLDER / f"worker-{os.environ.get('PACELINE_WORKER', '0')}.json").write_text(json.dumps(told))
