"""A worker of sharded training needs memory for its share only, from the start to the exported file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import os, re, threading
from functools import partial
import torch
from torch import nn
import paceline
from subjects import tell

WIDTH, LAYERS, workers = 1024, 16, int(os.environ["WORLD_SIZE"])
torch.optim.AdamW(nn.Linear(1, 1).parameters())  # imports 70 MB
data = torch.utils.data.TensorDataset(torch.ones(32, WIDTH), torch.ones(32, WIDTH))
resume = "auto" if os.path.exists(os.environ["SAVED"]) else None

def megabytes():
    text = open("/proc/self/smaps_rollup").read()
    sizes = {name: int(size) for name, size in re.findall(r"^(\\w+): +(\\d+) kB", text, re.MULTILINE)}
    # pages of the process that has forked the workers are no worker's: its part of them depends on who else lives
    return (sizes["Private_Clean"] + sizes["Private_Dirty"] + sizes["Pss_Shmem"]) / 1e3

def start(model, **more):
    return paceline.start(
        model=model, optimizer=partial(torch.optim.AdamW, lr=1e-4), loss=nn.functional.mse_loss, data=data,
        batch=4 * workers, microbatches=workers, strategy="sharded", exact=True, timeout_seconds=60, average="ema",
        **more,
    )

session = start(nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH)))  # what a process needs for any model
for batch in session.batches(steps=2):
    session.step(batch)
session.evaluate(data)
before, most, ended, phase = megabytes(), {}, threading.Event(), ["start"]

def watch():
    while not ended.wait(0.003):
        now = phase[0]
        most[now] = max(most.get(now, 0.0), megabytes() - before)

watcher = threading.Thread(target=watch)
watcher.start()
torch.manual_seed(0)
with paceline.deferred():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

session = start(model, checkpoint={"directory": os.environ["SAVED"], "every": 2}, resume=resume)
phase[0] = "steps and saves"
for batch in session.batches(steps=4 if resume else 2):
    session.step(batch)
phase[0] = "evaluation"
session.evaluate(data)
phase[0] = "export"
session.export(os.environ["SAVED"] + "/weights.safetensors")
with session.averaged():
    phase[0] = "evaluation of averages"
    session.evaluate(data)
    phase[0] = "export of averages"
    session.export(os.environ["SAVED"] + "/averages.safetensors")
found = session.fingerprint()
if resume:
    phase[0] = "second session"
    session = start(model)
    phase[0] = "its steps"
    for batch in session.batches(steps=2):
        session.step(batch)
ended.set()
watcher.join()
tell(most=most, fingerprint=found)
"""
PARAMETERS = 16 * (1024 * 1024 + 1024)


@pytest.mark.slow(turns=9)
def test_no_phase_holds_more_than_a_share(printed: Printed, tmp_path: Path) -> None:
    share = 20 * PARAMETERS / 4 / 1e6  # with averages
    sums, process = 16, 50  # three buckets, and what a process needs for more layers and for rounds of a save
    for _ in ("started", "resumed"):
        for one in printed(SCRIPT, 4, tmp_path, environment={"SAVED": str(tmp_path / "saved")}):
            assert max(one["most"].values()) < 1.1 * share + sums + process, one["most"]


TABLE = """
import os, re, threading
from functools import partial
import torch
from torch import nn
import paceline
from subjects import tell

ROWS, WIDTH, workers = 1_000_000, 32, int(os.environ["WORLD_SIZE"])
resume = "auto" if os.path.exists(os.environ["SAVED"]) else None
torch.optim.SGD(nn.Linear(1, 1).parameters())

class Net(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.table, self.top = paceline.SparseEmbedding(rows, WIDTH, block=1 << 15), nn.Linear(WIDTH, 1)
    def forward(self, words):
        return self.top(self.table(words).sum(1)).squeeze(1)

def start(rows, **more):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randint(0, rows, (64, 16)), torch.ones(64))
    with paceline.deferred():
        model = Net(rows)
    session = paceline.start(
        model=model, optimizer=partial(torch.optim.SGD, lr=0.01), loss=nn.functional.mse_loss, data=data, exact=True,
        batch=16, microbatches=4, strategy=os.environ["STRATEGY"] if workers > 1 else "single",
        server={"count": workers}, **more,
    )
    return data, session

def megabytes():  # of this worker alone, and its part of the memory that the workers share
    text = open("/proc/self/smaps_rollup").read() + open("/proc/self/status").read()
    sizes = {name: int(size) for name, size in re.findall(r"^(\\w+):\\s+(\\d+) kB", text, re.MULTILINE)}
    near = int(os.environ["LOCAL_WORLD_SIZE"])  # a worker alone has mapped its pages twice
    return (sizes["Pss_Anon"] + (sizes["RssShmem"] / near if near > 1 else sizes["Pss_Shmem"])) / 1e3

data, session = start(99)
for batch in session.batches(steps=2):
    session.step(batch)
session.evaluate(data)
before, most, ended = megabytes(), [0.0], threading.Event()

def watch():
    while not ended.wait(0.003):
        most[0] = max(most[0], megabytes() - before)

watcher = threading.Thread(target=watch)
watcher.start()
data, session = start(ROWS, checkpoint={"directory": os.environ["SAVED"]}, resume=resume)
for batch in session.batches(steps=4 if resume else 2):
    session.step(batch)
session.evaluate(data)
session.save()
ended.set()
watcher.join()
session.map(abs, [0])  # all stay until all have measured: a page of the parent counts more when others have ended
tell(most=most[0], fingerprint=session.fingerprint())
"""


@pytest.mark.slow(turns=9)
@pytest.mark.parametrize(("strategy", "machines"), [("sharded", [4]), ("parameter-server", [1, 1, 1, 1])], ids=str)
def test_a_table_of_twice_the_memory_of_a_worker_trains(
    printed: Printed, tmp_path: Path, strategy: str, machines: list[int]
) -> None:
    """A worker, or each of the machines, needs less than half of the memory of the table."""
    table = 1_000_000 * 32 * 4 / 1e6
    environment = {"STRATEGY": strategy, "SAVED": str(tmp_path / "saved")}
    (single,) = printed(TABLE, 1, tmp_path, environment={"SAVED": str(tmp_path / "alone")})
    assert single["most"] > table
    for most in (table / 2, table * 7 / 8):  # to resume, a worker has its share of the weights twice, and chunks
        everyone = printed(TABLE, 4, tmp_path, machines=machines, environment=environment)
        assert max(one["most"] for one in everyone) < most
        assert most > table / 2 or {one["fingerprint"] for one in everyone} == {single["fingerprint"]}
