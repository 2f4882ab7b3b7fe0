"""Workers that need a share of a checkpoint each read some of it, and get their share of the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_world import run

from paceline.checkpoint import load
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.manifest import TENSORS
from paceline.checkpoint.resume import Search, read_newest
from paceline.checkpoint.storage.locations import storage_at
from paceline.checkpoint.training_state import TrainingState
from paceline.events import EventLog
from paceline.schedule.slices import split_name
from paceline.settings import CheckpointSettings


class Striped:
    """Every n-th block of the moments on each worker, and everything else on all of them."""

    hashes: Mapping[str, str] | None = None

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def parts_of(self, name: str, shape: torch.Size, rank: int) -> list[slice]:
        count = shape.numel()
        if not name.startswith("optimizer/") or count < 2:
            return [slice(0, count)]
        return [slice(at, min(at + 64, count)) for at in range(64 * rank, count, 64 * self._workers)]

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError


def saved(directory: Path, *steps: int) -> dict[str, torch.Tensor]:
    """Save the state after each number of steps, and return the last one."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    model.register_buffer("empty", torch.empty(0, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    update: Any = SimpleNamespace(optimizer=optimizer, schedule=None, kind="AdamW", other_names=str)
    state = TrainingState(model, update, {"batch": 8}, {"exact": False}, {"torch": "2"}, {})
    world: Any = SimpleNamespace(rank=0, size=1, generation=0, alarmed=False, gather=lambda value, _: [value])
    checkpointer = Checkpointer(world, CheckpointSettings(directory=str(directory)), None, EventLog(None, 0))
    checkpointer.launch = 1
    for step in steps:
        for value in model.parameters():
            value.grad = torch.randn_like(value)
        optimizer.step()
        checkpointer.save(state, step)
    return {name: value.clone() for name, value in state.tensors().items()}


def damage(directory: Path, name: str, place: int) -> None:
    """Change a byte of a file; a negative place counts from its end."""
    (path,) = directory.glob(f"*/{name}")
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def read(world: Any, directory: Path) -> Search:
    """Read the newest checkpoint."""
    return read_newest(world, storage_at(directory), lambda *_: None, 60, Striped(world.size))


@pytest.mark.parametrize("chunk", [2000, load.CHUNK_BYTES])
def test_each_worker_gets_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(load, "CHUNK_BYTES", chunk)
    whole = saved(tmp_path, 1)
    everyone = run(3, lambda world: read(world, tmp_path).content)
    found: dict[str, int] = {}
    for content in everyone:
        for full, value in content.tensors.items():
            name, part = split_name(full)
            expected = whole[name] if part is None else whole[name].reshape(-1)[part]
            assert value.dtype == expected.dtype
            assert torch.equal(value, expected)
            found[name] = found.get(name, 0) + value.numel()
    assert set(found) == set(whole)
    cut = {name: whole[name].numel() for name in found if name.startswith("optimizer/") and whole[name].ndim}
    assert {name: found[name] for name in cut} == cut


@pytest.mark.parametrize(("name", "place"), [(TENSORS, 900), (TENSORS, -1), (TENSORS, 9), (".metadata", 30)])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, name: str, place: int) -> None:
    saved(tmp_path, 1, 2)
    damage(tmp_path / "step-000002", name, place)
    for search in run(2, lambda world: read(world, tmp_path)):
        assert search.content is not None
        assert search.content.manifest.step == 1
        assert list(search.damaged) and "SHA-256" in next(iter(search.damaged.values()))


def test_a_read_that_fails_once_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "CHUNK_BYTES", 1000)
    whole = saved(tmp_path, 1)
    fails = [load.files.read_at]

    def read_at(file: Any, offset: int, *more: Any) -> None:
        if offset > 4000 and len(fails) < 4:
            fails.append(read_at)
            raise OSError("the disk is gone")
        fails[0](file, offset, *more)

    monkeypatch.setattr(load.files, "read_at", read_at)
    for search in run(2, lambda world: read(world, tmp_path)):
        assert search.content is not None
        assert torch.equal(search.content.tensors["parameter/0.weight"], whole["parameter/0.weight"])
    assert len(fails) == 4
