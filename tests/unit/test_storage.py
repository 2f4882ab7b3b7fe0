"""The folder of checkpoints: the same behaviour on a path and at URLs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.checkpoint import locations
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.locations import storage_at
from paceline.checkpoint.manifest import FILE
from paceline.checkpoint.storage import Storage
from paceline.errors import ConfigError
from paceline.settings import CheckpointSettings

CONTENT = {"a": b"some", "b": b"other"}


@pytest.fixture(params=["path", "file://", "memory://"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    if request.param == "path":
        yield tmp_path / "run"
    elif request.param == "file://":
        yield f"file://{tmp_path}/run"
    else:
        import fsspec

        yield f"memory://{tmp_path.name}/run"
        fsspec.filesystem("memory").rm("/", recursive=True)


@pytest.fixture
def storage(place: Path | str) -> Storage:
    return storage_at(place)


def write(storage: Storage, name: str, commit: bool = True) -> None:
    storage.begin(name, 64)
    for file, content in CONTENT.items():
        with storage.create(name, file) as opened:
            opened.write(content)
    if commit:
        storage.commit(name, f"manifest of {name}")


def content_of(storage: Storage, name: str) -> dict[str, bytes]:
    found = {}
    for file in CONTENT:
        with storage.open(name, file) as opened:
            found[file] = opened.read()
    return found


def test_complete_with_the_manifest_and_not_before(storage: Storage, place: Path | str) -> None:
    assert storage.complete() == []
    write(storage, "step-000002")
    write(storage, "step-000010")
    write(storage, "step-000011", commit=False)
    again = storage_at(place)
    assert again.complete() == ["step-000010", "step-000002"]
    assert again.manifest("step-000010") == "manifest of step-000010"
    with pytest.raises(OSError):
        again.manifest("step-000099")
    assert content_of(again, "step-000002") == CONTENT


def test_what_an_interrupted_save_left_goes_with_the_next(storage: Storage, place: Path | str, tmp_path: Path) -> None:
    write(storage, "step-000001")
    write(storage, "step-000002", commit=False)
    write(storage_at(place), "step-000003")
    assert storage.complete() == ["step-000003", "step-000001"]
    if not str(place).startswith("memory"):
        there = {path.name for path in (tmp_path / "run").iterdir()}
        assert there == {"latest", "step-000001", "step-000003"}


def test_an_interrupted_save_may_be_repeated(storage: Storage) -> None:
    write(storage, "step-000002", commit=False)
    storage.abandon("step-000002")
    write(storage, "step-000002")
    assert storage.complete() == ["step-000002"]
    storage.abandon("step-000002")
    assert storage.complete() == ["step-000002"], "what is complete stays"


def test_removed(storage: Storage) -> None:
    write(storage, "step-000001")
    write(storage, "step-000002")
    storage.remove("step-000001")
    assert storage.complete() == ["step-000002"]


def test_damaged_ones_keep_their_files_under_another_name(storage: Storage) -> None:
    for number in ("", "-2", "-3"):
        write(storage, "step-000007")
        assert str(storage.set_aside("step-000007")) == f"{storage.location()}/damaged-step-000007{number}"
        assert storage.complete() == []
    assert content_of(storage, "damaged-step-000007-2") == CONTENT


def test_no_room(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="1,000,000,000,000,000 bytes are needed"):
        storage_at(tmp_path / "run").begin("step-000001", 10**15)


def test_a_directory_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-000005").mkdir()
    assert storage_at(tmp_path).complete() == []
    (tmp_path / "step-000005" / FILE).touch()
    assert storage_at(tmp_path).complete() == ["step-000005"]


def test_what_a_url_needs_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere://bucket/run.*cannot be used.*pip install"):
        storage_at("nowhere://bucket/run")


def test_split_and_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locations.split("s3://bucket/run/step-000001/") == ("s3://bucket/run", "step-000001")
    monkeypatch.chdir(tmp_path)
    assert locations.split("run/step-000001") == (tmp_path / "run", "step-000001")
    assert locations.same("run", tmp_path / "run") and not locations.same("run", "memory://run")
    assert locations.same("memory://run/", "memory://run")


@pytest.mark.parametrize("given", ["s3://bucket/run", "memory://run"])
def test_a_url_stays_a_url(given: str) -> None:
    assert CheckpointSettings(directory=given).directory == given
    assert CheckpointSettings(directory="run").directory == Path("run")
    with pytest.raises(ValueError, match="a Path cannot hold a URL"):
        CheckpointSettings(directory=Path(given))


def test_a_writer_that_comes_late_does_not_disturb_the_next_one(tmp_path: Path) -> None:
    """As one that was stopped and dropped: it goes on with a step that others have done and saved after."""
    late, now = Folder(tmp_path), Folder(tmp_path)
    now.begin("step-000012", 0)
    late.begin("step-000004", 0)
    late.commit("step-000004", "{}")
    now.commit("step-000012", "{}")
    assert now.complete() == ["step-000012", "step-000004"]
    assert (tmp_path / "latest").read_text() == "step-000012\n"
    late.begin("step-000008", 0)
    late.commit("step-000008", "{}")
    assert (tmp_path / "latest").read_text() == "step-000012\n"
    now.begin("step-000016", 0)
    late.begin("step-000016", 0)
    now.commit("step-000016", "{}")
    assert {path.name for path in tmp_path.glob(".partial-*")} == {late._partial("step-000016").name}
    now.begin("step-000020", 0)
    assert not late._partial("step-000016").exists()
