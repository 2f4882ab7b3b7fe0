"""Data sets of Hugging Face ``datasets``, of both kinds; and a stand-in with the interface of the first."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

TRAIN = """
import os
from functools import partial
import torch
import paceline
from paceline.data import Located
from subjects import tell

COLUMNS = {"values": torch.arange(159.0).view(53, 3) / 100, "label": torch.arange(53) % 3}

def forward(model, microbatch):
    return torch.nn.functional.cross_entropy(model(microbatch["values"]), microbatch["label"])

def train(data, stop=None, **settings):
    torch.manual_seed(0)
    session = paceline.start(
        model=torch.nn.Linear(3, 3), optimizer=partial(torch.optim.SGD, lr=0.1), forward=forward, data=data, batch=8,
        exact=True, **settings,
    )
    used = []
    for epoch in range(2):
        for batch in session.batches(epochs=1):
            if session.position == stop:
                return str(session.save())
            session.step(batch)
            rows = [row for group in batch.groups for row in group.data["values"]]
            used += [[batch.epoch, round(row[0].item() * 100)] for row in rows]
    return [session.fingerprint(), sorted(used)]
"""

STAND_IN = (
    TRAIN
    + """
class Table:
    # one item by number, a dictionary of columns for several, and a list of items for a loader
    def __len__(self):
        return 53
    def __getitem__(self, key):
        return {name: column[key] for name, column in COLUMNS.items()}
    def __getitems__(self, numbers):
        columns = self[numbers]
        return [{name: columns[name][place] for name in columns} for place in range(len(numbers))]

class Shard(Table):
    def __init__(self, shard):
        self.shard = range(18 * shard, min(53, 18 * shard + 18))
    def __len__(self):
        return len(self.shard)
    def __getitem__(self, key):
        return super().__getitem__(torch.tensor(self.shard)[key])

tell(table=train(Table()), shards=train(Located({str(shard): Shard(shard) for shard in range(3)})))
"""
)

REAL = (
    TRAIN
    + """
import datasets

table = datasets.Dataset.from_dict({name: column.tolist() for name, column in COLUMNS.items()}).with_format("torch")
tell(table=train(table))
own = {str(shard): table.shard(3, shard) for shard in range(3) if shard >= int(os.environ["RANK"])}
tell(shards=train(Located(datasets.DatasetDict(own))))
for name, shuffled in ("plain", False), ("shuffled", True):
    def stream():
        found = table.to_iterable_dataset(num_shards=3)
        return found.shuffle(seed=1, buffer_size=10) if shuffled else found
    saved = {"directory": os.environ["SAVED"] + name}
    train(stream(), 10, checkpoint=saved)
    tell(**{name: [train(stream()), train(stream(), checkpoint=saved, resume="auto")]})
"""
)


def test_items_that_are_dictionaries(printed: Printed, tmp_path: Path) -> None:
    (one,) = printed(STAND_IN, 1, tmp_path)
    assert one["table"][1] == [[epoch, 3 * row] for epoch in (0, 1) for row in range(53)]


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
def test_data_sets_of_both_kinds(printed: Printed, tmp_path: Path) -> None:
    (alone,) = printed(STAND_IN, 1, tmp_path)
    for one in printed(REAL, 2, tmp_path, environment={"SAVED": str(tmp_path / "saved-")}):
        assert one["table"][0] == alone["table"][0] and one["shards"][0] == alone["shards"][0]
        for name in ("plain", "shuffled"):
            whole, resumed = one[name]
            assert resumed[0] == whole[0]
