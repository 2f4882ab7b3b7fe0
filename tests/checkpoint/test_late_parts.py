"""A rank writes its part of a checkpoint at any time: what is published is whole, and holds no other files."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from interleaving import Interleaving
from test_two_writers import OLD, check_whole, snapshot

from paceline.checkpoint import load, parts
from paceline.checkpoint.manifest import FILE, name_of
from paceline.checkpoint.parts import Save, divide
from paceline.checkpoint.save import save
from paceline.checkpoint.storage.folder import Folder

SEEDS = 40
SNAPSHOT = snapshot(6, OLD)
PART = {name: SNAPSHOT.tensors[name] for name in ("parameter/b",)}


def publish(about: Save, seed: int, fails: bool, patch: pytest.MonkeyPatch) -> None:
    """Save on two ranks, in an order that the seed decides; an operation of rank 0 may fail once."""

    def fault(name: str, *_: Any) -> None:
        if fails and name == "rank 0" and sum(one == name for one, _ in turns.operations) == seed % 20 + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def write_part() -> None:
        with contextlib.suppress(OSError):  # rank 0 has written it
            parts.write(about, (OLD.launch, OLD.generation), 1, PART)

    turns = Interleaving(seed, patch, fault)
    work = {"rank 0": lambda: save(about, SNAPSHOT, OLD, 60.0, 2), "rank 1": write_part}
    actors = turns.run(work, lambda: None)  # type: ignore[arg-type]
    assert [one.error for one in actors.values()] == [None, None], f"order {seed}"


@pytest.mark.crossed
@pytest.mark.parametrize("fails", [False, True], ids=["the disk works", "the disk fails once"])
@pytest.mark.parametrize("waits", [False, True], ids=["rank 0 goes on", "rank 0 waits"])
def test_what_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool, fails: bool) -> None:
    monkeypatch.setattr(parts, "LEAST_BYTES", 1)
    assert divide(SNAPSHOT.tensors, 2)[1] == [*PART]
    wrote: set[str] = set()
    for seed in range(SEEDS):
        about = Save(Folder(tmp_path / str(seed)), name_of(6), None, bool, set() if waits else {1})
        with monkeypatch.context() as patch:
            publish(about, seed, fails, patch)
        (name,) = about.storage.complete()
        check_whole(about.storage.location(name))
        known = load.read(about.storage.location(name), lambda *_: None).manifest.files.keys()
        assert {*about.storage.names(name)} == {*known, FILE}, f"order {seed}"
        assert {*about.storage.names()} == {"latest", name_of(6)}, f"order {seed}"
        wrote |= known
    assert {"__1_0.distcp", "__1_1.distcp"} <= wrote, "both ranks have written it"
