"""How many open files a worker needs for the others of its machine."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.testing.ranks import Ended

SCRIPT = """
import gc, json, os
import torch
import paceline

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
samples = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
session = paceline.start(
    model=model, optimizer=lambda values: torch.optim.SGD(values, lr=0.1), loss=torch.nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(samples, samples), batch=32, exact=True, strategy=os.environ["STRATEGY"],
)
for batch in session.batches(steps=4):
    session.step(batch)
session.fingerprint()
gc.collect()
links = []
for name in os.listdir("/proc/self/fd"):
    try:
        links.append(os.readlink(f"/proc/self/fd/{name}"))
    except OSError:
        pass
kinds = ("/memfd:paceline", "anon_inode:[pidfd]", "socket:")
print(json.dumps([sum(link.startswith(kind) for link in links) for kind in kinds]), flush=True)
session.fingerprint()
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["allreduce", "stealing", "parameter-server"])
@pytest.mark.parametrize("workers", [2, 6])
def test_one_for_each_worker_of_the_machine(
    ranks: Callable[..., Sequence[Ended]], tmp_path: Path, workers: int, strategy: str
) -> None:
    everyone = ranks(SCRIPT, workers, tmp_path, environment={"STRATEGY": strategy})
    assert [one.code for one in everyone] == [0] * workers, "\n".join(one.err for one in everyone)
    for one in everyone:
        found: list[Any] = json.loads([line for line in one.out.splitlines() if line.startswith("[")][-1])
        arenas, handles, _ = found
        assert arenas <= workers + 1  # its own it has made, and opened as the others have
        assert handles == 0
