"""The folder of checkpoints: the same behaviour on a path and at URLs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.checkpoint.manifest import FILE
from paceline.checkpoint.storage import locations
from paceline.checkpoint.storage.base import FencedError, Storage, Writer, split
from paceline.checkpoint.storage.folder import Folder
from paceline.checkpoint.storage.locations import storage_at
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


ONE, TWO = Writer(1, 0, "11111111"), Writer(1, 1, "22222222")


def write(storage: Storage, step: str, commit: bool = True, writer: Writer = ONE) -> str:
    storage.begin(step, writer, 64)
    for file, content in CONTENT.items():
        with storage.create(step, writer, file) as opened:
            opened.write(content)
    if commit:
        storage.commit(step, writer, f"manifest of {step}", CONTENT)
    return f"{step}/{writer}"


def steps(storage: Storage) -> list[str]:
    return [split(name)[0] for name in storage.complete()]


def content_of(storage: Storage, name: str) -> dict[str, bytes]:
    found = {}
    for file in CONTENT:
        with storage.open(name, file) as opened:
            found[file] = opened.read()
    return found


def test_complete_with_the_manifest_and_not_before(storage: Storage, place: Path | str) -> None:
    assert storage.complete() == []
    earlier = write(storage, "step-000002")
    name = write(storage, "step-000010")
    write(storage, "step-000011", commit=False)
    again = storage_at(place)
    assert again.complete() == [name, earlier]
    assert again.manifest(name) == "manifest of step-000010"
    assert again.latest() == 10
    with pytest.raises(FileNotFoundError):
        again.manifest("step-000099")
    with pytest.raises(FileNotFoundError):
        again.manifest("step-000099")
    assert content_of(again, earlier) == CONTENT


def test_what_an_interrupted_save_left_goes_with_a_later_writers(storage: Storage, tmp_path: Path) -> None:
    write(storage, "step-000001")
    write(storage, "step-000002", commit=False)
    write(storage, "step-000003", writer=TWO)
    assert steps(storage) == ["step-000003", "step-000001"]
    if isinstance(storage, Folder):
        assert {path.name for path in (tmp_path / "run").iterdir()} == {"latest", "step-000001", "step-000003"}
    else:
        assert storage.files_of(f"step-000002/{ONE}") == ["fenced"]


def test_an_interrupted_save_may_be_repeated(storage: Storage) -> None:
    write(storage, "step-000002", commit=False)
    storage.abandon("step-000002", ONE)
    write(storage, "step-000002")
    assert steps(storage) == ["step-000002"]
    storage.abandon("step-000002", ONE)
    assert steps(storage) == ["step-000002"], "what is complete stays"


def test_removed(storage: Storage) -> None:
    name = write(storage, "step-000001")
    write(storage, "step-000002")
    storage.remove(name)
    assert steps(storage) == ["step-000002"]
    storage.remove(name)


def test_damaged_ones_keep_their_files_under_another_name(storage: Storage) -> None:
    for number in ("", "-2", "-3"):
        name = write(storage, "step-000007")
        assert str(storage.set_aside(name)) == f"{storage.location()}/damaged-step-000007{number}"
        assert storage.complete() == [] and storage.latest() == -1
    assert content_of(storage, "damaged-step-000007-2") == CONTENT


def test_no_room(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="1,000,000,000,000,000 bytes are needed"):
        storage_at(tmp_path / "run").begin("step-000001", ONE, 10**15)


def test_a_directory_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-000005").mkdir()
    assert storage_at(tmp_path).complete() == []
    (tmp_path / "step-000005" / FILE).touch()
    assert storage_at(tmp_path).complete() == ["step-000005"]


def test_the_newest_is_the_one_with_the_most_steps(tmp_path: Path) -> None:
    for name in (
        "step-000005",
        "step-999999",
        "damaged-step-000099",
        "step-1000000",
        "latest",
        "step-x",
        "step-000040",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).touch()
    assert storage_at(tmp_path).complete() == ["step-1000000", "step-999999", "step-000040", "step-000005"]


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


def test_a_writer_that_comes_late_is_fenced(storage: Storage, place: Path | str) -> None:
    """As one that was stopped in the middle of a save, and dropped: others have gone on."""
    late, now = storage, storage_at(place)
    first = write(late, "step-000002")
    write(late, "step-000004", commit=False)
    second = write(now, "step-000004", writer=TWO)
    with pytest.raises((FencedError, FileNotFoundError)):
        late.commit("step-000004", ONE, "{}", CONTENT)
    with pytest.raises(FencedError, match="written by a worker of a later generation now") as caught:
        late.begin("step-000006", ONE, 0)
    assert caught.value.replaced
    assert now.complete() == [second, first]
    with pytest.raises(FencedError, match="another run") as caught:
        now.begin("step-000008", Writer(0, 7, "33333333"), 0)
    assert not caught.value.replaced


def test_what_another_writer_of_the_same_generation_has_begun_stays(storage: Storage, place: Path | str) -> None:
    other = Writer(1, 0, "99999999")
    write(storage, "step-000004", commit=False, writer=other)
    write(storage_at(place), "step-000006")
    storage.commit("step-000004", other, "{}", CONTENT)
    assert steps(storage) == ["step-000006", "step-000004"]
    assert not ONE.may_remove(other) and ONE.may_remove(None) and TWO.may_remove(ONE) and not ONE.may_remove(TWO)


def test_of_one_step_the_latest_writer_counts(storage: Storage) -> None:
    first = write(storage, "step-000004")
    second = write(storage, "step-000004", writer=TWO)
    assert storage.complete() == [second, first]
    assert storage.next_launch() == 2
