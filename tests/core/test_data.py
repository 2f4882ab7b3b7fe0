"""Loading and evaluation: each sample once, augmented alike, whoever loads it."""

import contextlib
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.testing.ranks import Kill

Printed = Callable[..., list[dict[str, Any]]]

AUGMENTED = """
import random
import numpy
import torch
from functools import partial
import paceline
from subjects import tell

class Augmented:
    def __len__(self):
        return 37
    def __getitem__(self, sample):
        drawn = [*torch.rand(2).tolist(), random.random(), random.gauss(0, 1)]
        drawn += [numpy.random.random(), numpy.random.randn()]
        return torch.tensor([sample, *drawn], dtype=torch.float64), sample

seen = {}
for loaders in (0, 1, 2):
    torch.manual_seed(0)
    session = paceline.start(
        model=torch.nn.Linear(7, 2).double(), optimizer=partial(torch.optim.SGD, lr=0.0), data=Augmented(), batch=10,
        loss=lambda output, target: output.sum(1).mean(), exact=True, workers_per_loader=loaders,
    )
    found = seen[loaders] = {}
    for batch in session.batches(epochs=2):
        session.step(batch)
        for group in batch.groups:
            for row in group.data[0].tolist():
                found[f"{batch.epoch} {int(row[0])}"] = row
tell(seen=seen)
"""


@pytest.mark.slow
def test_augmentation_does_not_depend_on_who_loads(printed: Printed, tmp_path: Path) -> None:
    everywhere: list[dict[str, list[float]]] = []
    for workers in (1, 3):
        of_ranks = [one["seen"] for one in printed(AUGMENTED, workers, tmp_path)]
        for loaders in ("0", "1", "2"):
            rows: dict[str, list[float]] = {}
            for seen in of_ranks:
                assert not rows.keys() & seen[loaders].keys()
                rows |= seen[loaders]
            everywhere.append(rows)
    assert sorted(everywhere[0]) == sorted(f"{epoch} {sample}" for epoch in range(2) for sample in range(37))
    assert all(rows == everywhere[0] for rows in everywhere)
    draws = [tuple(row[1:]) for row in everywhere[0].values()]
    assert len(set(draws)) == len(draws)


EVALUATED = """
import torch
from functools import partial
import paceline
from subjects import tell

class Counted(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length, self.visited = length, []
        self.rows = torch.randn(length, 4, generator=torch.Generator().manual_seed(length))
    def __len__(self):
        return self.length
    def __getitem__(self, sample):
        self.visited.append(sample)
        return self.rows[sample], sample % 3

torch.manual_seed(0)
session = paceline.start(
    model=torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5)), data=Counted(16), batch=8, exact=True,
    loss=torch.nn.functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1),
)
for length in (2, 101):
    data = Counted(length)
    accuracy = session.evaluate(data, lambda output, target: (output.argmax(1) == target).float().mean())
    visited, data.visited = data.visited, []
    pairs = session.evaluate(data, lambda output, target: (1, 2))
    tell(**{str(length): [visited, accuracy, session.evaluate(data), pairs]})
tell(training=session._context.compute.model.training)
"""


def test_evaluation_visits_each_sample_once(printed: Printed, tmp_path: Path) -> None:
    alone: dict[str, Any] = {}
    for workers in (1, 3, 4):
        everyone = printed(EVALUATED, workers, tmp_path)
        assert all(one["training"] for one in everyone)
        for length in ("2", "101"):
            visited = [sample for one in everyone for sample in one[length][0]]
            assert sorted(visited) == list(range(int(length)))
            values = {tuple(one[length][1:]) for one in everyone}
            assert values == {tuple((alone or everyone[0])[length][1:])}
            assert everyone[0][length][3] == 0.5
        alone = alone or everyone[0]


@pytest.mark.parametrize("what", ["data", "metric"])
def test_evaluation_says_what_it_cannot_use(ranks: Any, tmp_path: Path, what: str) -> None:
    call = {"data": "session.evaluate(iter([]))", "metric": "session.evaluate(data, lambda output, target: output)"}[
        what
    ]
    script = f"""
import torch, paceline
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.long))
session = paceline.start(
    model=torch.nn.Linear(4, 2), data=data, batch=8, loss=torch.nn.functional.cross_entropy, optimizer=torch.optim.SGD
)
{call}
"""
    (ended,) = ranks(script, 1, tmp_path)
    words = {"data": "The stream gave no samples", "metric": "a tensor of shape [8, 2]"}[what]
    assert ended.code != 0
    assert words in ended.err
    assert "Traceback" not in ended.err


LOADED_FOR_LONG = """
import os, time
from functools import partial
import torch
import paceline

class Slow:
    read = 0
    def __len__(self):
        return 8
    def __getitem__(self, sample):
        self.read += torch.utils.data.get_worker_info() is not None
        if self.read > 4:  # the second step
            print("loader", os.getpid(), flush=True)
            time.sleep(600)
        return torch.zeros(4)

session = paceline.start(
    model=torch.nn.Linear(4, 1), optimizer=partial(torch.optim.SGD, lr=0.1), data=Slow(), batch=4,
    forward=lambda model, rows: model(rows).mean(), workers_per_loader=1,
)
for batch in session.batches(epochs=1):
    session.step(batch)
"""


def test_a_loader_process_ends_with_its_rank(ranks: Callable[..., Any], tmp_path: Path) -> None:
    (ended,) = ranks(LOADED_FOR_LONG, 1, tmp_path, kill=Kill("\n"), deadline=60)
    assert ended.signal == "SIGKILL", ended.err
    loader = int(ended.out.split()[1])
    with contextlib.suppress(ProcessLookupError):  # it has ended
        poll = select.poll()
        poll.register(os.pidfd_open(loader), select.POLLIN)
        assert poll.poll(20_000), "it still loads"
