"""Two writers and a reader on one folder or store, in many orders: there is always a complete newest step."""

import os
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interleaving import Interleaving, save_alone

from paceline.checkpoint import load
from paceline.checkpoint.manifest import name_of, step_of
from paceline.checkpoint.resume import read_newest
from paceline.checkpoint.save import retain
from paceline.checkpoint.storage.base import FencedError, Writer, split, writer_of
from paceline.checkpoint.storage.locations import storage_at
from paceline.checkpoint.training_state import Snapshot
from paceline.errors import CheckpointError

SEEDS = int(os.environ.get("INTERLEAVINGS", "30"))  # of all; in full: 600
ALONE: Any = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), gather=lambda value, _: [value])
OLD = Writer(1, 0, "0000000a")
NEXT = {"a new rank 0": Writer(1, 1, "0000000b"), "another launch": Writer(2, 0, "0000000c")}


def snapshot(step: int, writer: Writer) -> Snapshot:
    """A state that says who wrote it, in two places."""
    value = torch.tensor([step, writer.launch, writer.generation])
    return Snapshot(step, {"parameter/a": value, "parameter/b": value.clone()}, {"writer": str(writer)}, {}, {}, {})


def check_whole(location: Path | str) -> None:
    """Read a checkpoint with all hashes; it must be of the writer, and the step, in its name."""
    content = load.read(location, lambda *_: None)
    writer = writer_of(str(location))
    assert writer is not None and content.manifest.state == {"writer": str(writer)}
    expected = [content.manifest.step, writer.launch, writer.generation]
    assert [value.tolist() for value in content.tensors.values()] == [expected, expected]
    assert name_of(content.manifest.step) in str(location)


class Trial:
    """One order of the operations of two writers and a reader."""

    def __init__(self, place: Path | str, seed: int, later: Writer, patch: pytest.MonkeyPatch) -> None:
        self.place, self.later = place, later
        self.done: list[int] = []
        self.fenced: list[Writer] = []
        self.newest, self.seen = -1, ""
        self.turns = Interleaving(seed, patch)
        self.draws = random.Random(-seed)

    def run(self) -> None:
        save_alone(storage_at(self.place), snapshot(2, OLD), OLD, 60)  # what both were resumed from
        work = {
            "old": partial(self._train, OLD, (4, 6, 8)),
            "new": partial(self._train, self.later, (6, 8, 10)),
            "reader": self._resume,
        }
        kill = {}
        if self.draws.random() < 0.5:
            kill[self.draws.choice(["old", "new"])] = self.draws.randrange(150)
        actors = self.turns.run(work, self._check, kill)
        for one in actors.values():
            if one.error is not None:
                raise one.error
        assert not self.fenced or self.fenced == [OLD], "the later writer is never stopped"
        if not kill:
            assert self.newest == 10
        self._check_the_next_launch()

    def _train(self, writer: Writer, steps: tuple[int, ...]) -> None:
        storage = storage_at(self.place)
        for step in steps:
            try:
                save_alone(storage, snapshot(step, writer), writer, 60)
            except FencedError:
                self.fenced.append(writer)
                return
            self.done.append(step)
            retain(storage, step, writer, 1, None)

    def _resume(self) -> None:
        for _ in range(3):
            least = self.newest
            search = read_newest(ALONE, storage_at(self.place), lambda *_: None, 60)
            assert search.content is not None and not search.damaged and not search.missing
            assert search.content.manifest.step >= least, "it was there before the reader looked"

    def _check(self) -> None:
        """A newest step stays until there is a newer one; whatever is listed is whole."""
        names = storage_at(self.place).complete()
        newest = step_of(split(names[0])[0])
        assert newest >= self.newest and newest >= max(self.done, default=0)
        if names[0] != self.seen:
            check_whole(storage_at(self.place).location(names[0]))
        self.newest, self.seen = newest, names[0]

    def _check_the_next_launch(self) -> None:
        """It goes on from there, and takes away what was left."""
        storage = storage_at(self.place)
        for name in storage.complete():
            check_whole(storage.location(name))
        writer = Writer(storage.next_launch(), 0, "0000000d")
        assert writer.launch > self.later.launch or self.later.generation == 0
        search = read_newest(ALONE, storage, lambda *_: None, 60)
        assert search.content is not None and search.content.manifest.step == self.newest
        save_alone(storage, snapshot(12, writer), writer, 60)
        retain(storage, 12, writer, 1, None)
        assert [split(name)[0] for name in storage.complete()] == ["step-000012"]
        if isinstance(self.place, Path):
            assert sorted(os.listdir(self.place)) == ["latest", "step-000012"]


@pytest.mark.sampled(2)
@pytest.mark.timeout(10 * SEEDS)
@pytest.mark.parametrize("later", NEXT)
def test_two_writers_and_a_reader(places: Any, later: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(SEEDS // 6):
        with monkeypatch.context() as patch:
            try:
                Trial(places(seed), seed, NEXT[later], patch).run()
            except (AssertionError, CheckpointError, OSError) as error:
                error.add_note(f"order {seed}")
                raise
