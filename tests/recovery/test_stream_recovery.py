"""Streams of unknown length: one result on any number of workers, through kills, joins and a resume in an epoch."""

from pathlib import Path
from typing import Any

import pytest
from launching import Ran, Run

from paceline.observe import ledger
from paceline.testing import faults

SIZES = [(17, 9, 23), (17, 9, 20), (12, 9, 23)]
BATCH = 16
STEPS = 10

STREAM = f"""
import os, random
from functools import partial
import torch
import paceline
from subjects import tell

class Shards(torch.utils.data.IterableDataset):
    # three files of which nobody knows how many lines they have, in another order in each epoch
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        shards = [0, 1, 2]
        random.shuffle(shards)
        for shard in shards:
            for line in range({SIZES}[self.epoch][shard]):
                number = 100 * shard + line
                yield torch.tensor([number / 100, 1.0]) + torch.tensor([0.0, torch.rand(())]), number

def forward(model, microbatch):
    return (model(microbatch[0]) - 1).square().mean()

torch.manual_seed(0)
session = paceline.start(
    model=torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)),
    optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    forward=forward, data=Shards(), batch={BATCH}, exact=True, timeout_seconds=30,
)
for epoch in range(3):
    for batch in session.batches(epochs=1):
        session.step(batch)
        for group in batch.groups if batch.generation == session._context.world.generation else ():
            print("used", batch.epoch, batch.step, *group.data[1].tolist(), flush=True)
        if batch.step == int(os.environ.get("STOP", -1)):
            session.save()
            session._context.world.gather(None, "saved")
            os._exit(3)
tell(fingerprint=session.fingerprint(), position=session.position)
"""


def samples_of(step: int) -> int:
    """What the batch of a step has: epochs of 49, 46 and 44 samples."""
    sizes = [min(BATCH, sum(size) - start) for size in SIZES for start in range(0, sum(size), BATCH)]
    return sizes[step]


def used(ran: Ran, steps: range) -> list[tuple[int, int]]:
    """The samples that were computed in some steps, with their epochs."""
    found = []
    for text in ran.logs.values():
        for line in text.splitlines():
            if line.startswith("used"):
                epoch, step, *numbers = map(int, line.split()[1:])
                found += [(epoch, number) for number in numbers if step in steps]
    return found


@pytest.mark.slow
def test_a_stream_on_any_number_of_workers(run: Run, undisturbed: Any, tmp_path: Path) -> None:
    alone = undisturbed(STREAM)
    every = [
        (e, 100 * shard + line) for e, size in enumerate(SIZES) for shard in range(3) for line in range(size[shard])
    ]
    first = run(STREAM, "-n", 2, name="first", STOP="4")
    assert first.code != 0
    assert first.saved() == [5], first.report()
    resumed = run(STREAM, "-n", 3, "--resume", first.run / "checkpoints", name="second")
    assert resumed.printed() == [alone] * 3, resumed.report()
    assert sorted(used(first, range(5)) + used(resumed, range(5, STEPS))) == every

    plan = faults.kill(rank=1, step=5)
    killed = run(STREAM, "-n", 5, "--elastic", "2:5", "--standby", 1, faults=plan, name="killed")
    assert killed.printed()[0] == alone, killed.report()
    assert {str(one) for one in killed.printed()} == {str(alone)}
    assert len(killed.launcher("lost")) == 1
    assert ledger.check(ledger.read(killed.run / "events"), STEPS, samples_of) == [], killed.report()
