"""How the parts of a checkpoint are divided, written and collected."""

import doctest
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from paceline.checkpoint import files, load, parts, save
from paceline.checkpoint.parts import Save, divide
from paceline.checkpoint.storage.base import Writer
from paceline.checkpoint.storage.folder import Folder
from paceline.checkpoint.tensors import fingerprint
from paceline.checkpoint.training_state import Snapshot

STATE = {f"parameter/{place}": torch.full((place + 1, 1000), float(place)) for place in range(9)}
EQUAL = {f"parameter/{place}": torch.zeros(1000) for place in range(7)}
WRITER = Writer(1, 0, "11111111")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LEAST_BYTES", 1000)


def save_in(folder: Path, over: bool = False, key: bytes | None = None) -> Save:
    return Save(Folder(folder), "step-000004", key, lambda: over)


def saved(about: Save, workers: int) -> Path:
    path = save.save(about, Snapshot(4, STATE, None, {}, {}, {}), WRITER, 5.0, workers)
    (found,) = Path(path).iterdir()
    return found


def writers(about: Save, workers: int) -> list[threading.Thread]:
    """The other ranks, which write their parts."""
    threads = []
    for rank, names in enumerate(divide(STATE, workers)):
        tensors = {name: STATE[name] for name in names}
        if rank > 0:
            threads.append(threading.Thread(target=parts.write, args=(about, (1, 0), rank, tensors)))
            threads[-1].start()
    return threads


def test_parts_are_even_and_always_the_same() -> None:
    assert divide(EQUAL, 3) == [[f"parameter/{place}" for place in part] for part in ((0, 3, 6), (1, 4), (2, 5))]
    assert divide(EQUAL, 3) == divide(dict(reversed(EQUAL.items())), 3)
    for workers in (1, 2, 3, 4, 64):
        divided = divide(STATE, workers)
        assert divided == divide(dict(reversed(STATE.items())), workers)
        assert sorted(name for part in divided for name in part) == sorted(STATE)
        if workers < 5:
            sizes = [sum(STATE[name].nbytes for name in part) for part in divided]
            assert max(sizes) <= 4 / 3 * sum(sizes) / workers  # Graham 1969
    assert all(divide(STATE, 64))
    assert divide({}, 4) == [[]]
    assert divide({"a": torch.zeros(1000), "b": torch.zeros(0), "c": torch.zeros(0)}, 3) == [["a"], ["b", "c"]]
    assert len(divide({"small": torch.zeros(3)}, 4)) == 1


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("key", [None, b"key"])
def test_each_rank_writes_its_part(tmp_path: Path, workers: int, key: bytes | None) -> None:
    about = save_in(tmp_path, key=key)
    threads = writers(about, workers)
    place = saved(about, workers)
    for thread in threads:
        thread.join()
    expected = {f"__{rank}_0.distcp" for rank in range(workers)} | {".metadata", "manifest.json"}
    assert {path.name for path in place.iterdir()} == expected
    content = load.read(place, lambda *_: None)
    content.manifest.check_signature(key, place)
    assert content.manifest.fingerprint == fingerprint(STATE) == fingerprint(content.tensors)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_programs_read_the_parts(tmp_path: Path) -> None:
    about = save_in(tmp_path)
    threads = writers(about, 3)
    place = saved(about, 3)
    for thread in threads:
        thread.join()
    found = {name: torch.zeros_like(value) for name, value in STATE.items()}
    dcp.load(found, checkpoint_id=place, no_dist=True)
    assert fingerprint(found) == fingerprint(STATE)


def test_rank_0_writes_what_nobody_writes(tmp_path: Path) -> None:
    about = save_in(tmp_path, over=True)
    place = saved(about, 3)
    expected = {"__0_0.distcp", "__1_1.distcp", "__2_1.distcp", ".metadata", "manifest.json"}
    assert {path.name for path in place.iterdir()} == expected
    assert about.absent == {1, 2}
    assert load.read(place, lambda *_: None).manifest.fingerprint == fingerprint(STATE)


@pytest.mark.parametrize("what", ["another key", "another step", "another part", "cut"])
def test_a_description_that_is_not_of_this_save_is_not_taken(tmp_path: Path, what: str) -> None:
    about = save_in(tmp_path, key=b"key")
    about.storage.begin("step-000004", WRITER, 0)
    names = divide(STATE, 2)[1]
    other = Save(about.storage, about.step, b"other" if what == "another key" else b"key", about.over)
    assert parts.write(other, (1, 0), 1, {name: STATE[name] for name in names}) is not None
    (path,) = tmp_path.glob(".partial-*/parts/.part-1")
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    writer = WRITER
    if what == "another step":
        writer = Writer(1, 0, "22222222")
        path.parents[1].rename(tmp_path / f".partial-step-000004-{writer}")
    if what == "another part":
        names = names[:-1]
    assert parts.collect(about, writer, 1, names, deadline=0.0) is None


def test_a_description_without_its_file_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 begins again, after an error, when another rank has written its part but not the description."""
    about, names, write = save_in(tmp_path), divide(STATE, 2)[1], files.write_part
    about.storage.begin("step-000004", WRITER, 0)

    def then_again(*arguments: Any) -> files.CheckpointShard:
        part = write(*arguments)
        about.storage.begin("step-000004", WRITER, 0)
        return part

    monkeypatch.setattr(files, "write_part", then_again)
    assert parts.write(about, (1, 0), 1, {name: STATE[name] for name in names}) is not None
    assert about.storage.read_part("step-000004", WRITER, ".part-1", 1) is not None
    assert parts.collect(about, WRITER, 1, names, deadline=0.0) is None


def test_a_rank_gives_up_where_rank_0_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BEGIN_SECONDS", 0.05)
    assert parts.write(save_in(tmp_path), (1, 0), 1, STATE) is None
    monkeypatch.setattr(parts, "BEGIN_SECONDS", 60.0)
    assert parts.write(save_in(tmp_path, over=True), (1, 0), 1, STATE) is None
    saved(save_in(tmp_path), 1)  # it is complete, without others
    begin = time.monotonic()
    assert parts.write(save_in(tmp_path), (1, 0), 1, STATE) is None
    assert time.monotonic() - begin < 30


def test_a_rank_of_another_generation_does_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BEGIN_SECONDS", 0.05)
    about = save_in(tmp_path)
    about.storage.begin("step-000004", WRITER, 0)
    assert parts.write(about, (1, 1), 1, STATE) is None
    assert parts.write(save_in(tmp_path), (2, 0), 1, STATE) is None


def test_the_example_is_true() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "LEAST_BYTES", 1 << 22)
        assert doctest.testmod(parts, extraglobs={"torch": torch}).failed == 0
