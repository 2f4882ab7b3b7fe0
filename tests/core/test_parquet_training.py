"""Training on Parquet files gives the bits of training on the same tensors in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Printed = Callable[..., list[dict[str, Any]]]

TRAINED = """
import os
import torch
from functools import partial
import paceline
from subjects import tell

torch.manual_seed(1)
inputs = torch.randn(90, 6)
in_memory = torch.utils.data.TensorDataset(inputs, inputs.argmax(1))
files = paceline.ParquetDataset(os.environ["FILES"], columns=["inputs", "label"])
few = paceline.ParquetDataset(os.environ["FILES"], columns=["inputs", "label"], memory_gigabytes=0)
found = []
for data, loaders in [(in_memory, 0), (files, 0), (few, 2)]:
    torch.manual_seed(0)
    session = paceline.start(
        model=torch.nn.Linear(6, 6), optimizer=partial(torch.optim.AdamW, lr=0.01), data=data, batch=20,
        loss=torch.nn.functional.cross_entropy, exact=True, workers_per_loader=loaders,
    )
    for batch in session.batches(epochs=2):
        session.step(batch)
    found.append(session.fingerprint())
tell(fingerprints=found)
"""


def write(folder: Path) -> None:
    """The same samples in three files of several row groups."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(1)
    inputs = torch.randn(90, 6)
    table = pa.table({"label": inputs.argmax(1).numpy(), "inputs": list(inputs.numpy())})
    for number in range(3):
        pq.write_table(table.slice(number * 40, 40), folder / f"part-{number}.parquet", row_group_size=16)


@pytest.mark.slow
def test_the_bits_of_tensors_in_memory(printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setenv("FILES", str(tmp_path))
    everywhere = [one["fingerprints"] for workers in (1, 3) for one in printed(TRAINED, workers, tmp_path)]
    assert len(everywhere) == 4 and {fingerprint for one in everywhere for fingerprint in one} == {everywhere[0][0]}


DIFFERENT = """
import os
import torch
from functools import partial
import paceline

files = paceline.ParquetDataset(f"{os.environ['FILES']}/{os.environ['RANK']}", columns=["inputs", "label"])
paceline.start(
    model=torch.nn.Linear(6, 6), optimizer=partial(torch.optim.SGD, lr=0.01), data=files, batch=20,
    loss=torch.nn.functional.cross_entropy,
)
"""


def test_workers_that_see_other_files(
    ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        write(tmp_path / str(rank))
    path = tmp_path / "1" / "part-2.parquet"
    table = pq.read_table(path)
    pq.write_table(table.take(list(range(len(table)))[::-1]), path)
    monkeypatch.setenv("FILES", str(tmp_path))
    for ended in ranks(DIFFERENT, 2, tmp_path):
        assert ended.code == 3
        assert "The workers do not agree on data fingerprint: rank 0: " in ended.err, ended.err
