"""When checkpoints are written and how they are read, in one process and on a world that is made up."""

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it, and it sets a variable of the environment

from paceline.checkpoint import background, checkpointer, files, load, resume, training_state
from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.interval import Interval
from paceline.checkpoint.storage.base import Writer
from paceline.checkpoint.training_state import HostBuffers, Snapshot, TrainingState
from paceline.errors import CheckpointError, ConfigError, WorkerLost
from paceline.events import EventLog
from paceline.settings import CheckpointSettings


class Facts(EventLog):
    """Events, kept."""

    def __init__(self) -> None:
        super().__init__(None, 0)
        self.all: list[tuple[str, dict[str, Any]]] = []

    def mark(self, event: str, **fields: object) -> None:
        self.all.append((event, fields))

    def named(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.all if name == event]


class Made:
    """A small model in training, and its checkpointer."""

    def __init__(self, directory: Path | str, rank: int = 0, others: tuple[Any, ...] = (), **settings: Any) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        update: Any = SimpleNamespace(optimizer=self.optimizer, schedule=None, kind="AdamW", other_names=str)
        self.state = TrainingState(self.model, update, {"batch": 8}, {"exact": False}, {"torch": "2"}, {})
        self.events = Facts()
        self.world: Any = SimpleNamespace(
            rank=rank, size=1 + len(others), generation=0, gather=lambda value, _: [value, *others]
        )
        self.checkpointer = Checkpointer(
            self.world, CheckpointSettings(directory=directory, **settings), None, self.events
        )
        self.save, self.begin_save = (
            partial(self.checkpointer.save, self.state),
            partial(self.checkpointer.begin_save, self.state),
        )

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3)).square().mean().backward()
        self.optimizer.step()

    def weight(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits until this is set."""
    gate = threading.Event()
    write = files.write_part

    def waiting(*arguments: Any) -> files.CheckpointShard:
        assert gate.wait(60)
        return write(*arguments)

    monkeypatch.setattr(files, "write_part", waiting)
    yield gate
    gate.set()
    background.join_all(60)


def fail(*_: object) -> None:
    raise OSError(errno.EROFS, "the disk is gone")


@pytest.mark.parametrize("store", ["", "file://", "memory://"])
def test_what_is_saved_is_the_state_when_it_was_due(tmp_path: Path, held: threading.Event, store: str) -> None:
    one = Made(f"{store}{tmp_path}/saved")
    weights = []
    for step in (1, 2):
        one.train()
        weights.append(one.weight())
        if step == 2:
            held.set()
        one.begin_save(step)
        assert (one.checkpointer.last is None) == (step == 1)
    one.train()
    one.checkpointer.finish()
    assert one.checkpointer.last == (one.checkpointer._storage.location("step-000002"), 2)  # type: ignore[union-attr]
    for step, weight in enumerate(weights, 1):
        again = Made(f"{store}{tmp_path}/elsewhere")
        assert again.checkpointer.resume(again.state, f"{store}{tmp_path}/saved/step-00000{step}") == step
        assert torch.equal(again.weight(), weight)
        assert len(again.optimizer.state) == 2


def test_saving_at_once_waits_for_the_one_under_way(tmp_path: Path, held: threading.Event) -> None:
    one = Made(tmp_path)
    one.begin_save(1)
    threading.Timer(0.05, held.set).start()
    assert one.save(2) == tmp_path / "step-000002"
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000001", "step-000002"]
    assert [save["step"] for save in one.events.named("checkpoint")] == [1, 2]


def test_another_session_sees_what_is_still_being_written(tmp_path: Path, held: threading.Event) -> None:
    Made(tmp_path).begin_save(1)
    threading.Timer(0.05, held.set).start()
    again = Made(tmp_path)
    assert again.checkpointer.resume(again.state, "auto") == 1


@pytest.mark.parametrize("when", ["due", "save", "begin_save", "finish", "resume"])
def test_an_error_in_the_background_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    one = Made(tmp_path, keep=9)
    one.save(1)
    with monkeypatch.context() as broken:
        broken.setattr(files, "write_part", fail)
        one.begin_save(2)
        background.join_all(60)
    then: dict[str, Callable[[], Any]] = {
        "due": lambda: one.checkpointer.due(3),
        "save": lambda: one.save(3),
        "begin_save": lambda: one.begin_save(3),
        "finish": one.checkpointer.finish,
        "resume": lambda: one.checkpointer.resume(one.state, "auto"),
    }
    with pytest.raises(CheckpointError, match=r"step 2 could not be written.*disk is gone.*last good one is .*000001"):
        then[when]()
    assert "disk is gone" in one.events.named("checkpoint-failed")[0]["reason"]
    one.checkpointer.finish()
    one.save(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001", "step-000004"]


@pytest.mark.parametrize("fails", [False, True])
def test_workers_that_survive_losses_end_a_save_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A save that a loss interrupts is not made: the workers that are left make it again."""
    one, met = Made(tmp_path), list[int]()

    def meet(*_: object) -> None:
        met.append(len(list(tmp_path.glob("step-*"))))
        if len(met) == 1:
            raise WorkerLost

    one.world.gather = meet
    if fails:
        monkeypatch.setattr(files, "write_part", fail)
    with pytest.raises(WorkerLost):
        one.save(1, together=True)
    assert one.checkpointer.made == -1
    with pytest.raises(CheckpointError) if fails else nullcontext():
        one.save(1, together=True)
    assert met == [1 - fails] * 2
    assert one.checkpointer.made == (-1 if fails else 1)


@pytest.mark.parametrize("in_background", [True, False])
def test_what_is_recorded(tmp_path: Path, in_background: bool) -> None:
    one = Made(tmp_path, background=in_background)
    one.begin_save(3)
    one.checkpointer.finish()
    (told,) = one.events.named("checkpoint")
    assert told["step"] == 3 and told["path"] == str(tmp_path / "step-000003") and told["bytes"] == 8 * 4
    assert (told["stall"] < told["seconds"]) == in_background


def test_only_rank_0_writes_whoever_that_is(tmp_path: Path) -> None:
    one = Made(tmp_path, rank=1)
    one.save(1)
    one.begin_save(2)
    one.checkpointer.finish()
    assert list(tmp_path.iterdir()) == []
    one.world.rank = 0
    one.begin_save(3)
    one.checkpointer.finish()
    assert (tmp_path / "step-000003").is_dir()


def test_memory_for_the_copy_is_used_again() -> None:
    value = torch.arange(4.0)
    snapshot = Snapshot(1, {"a": value, "b": torch.tensor(1)}, None, {}, {}, {})
    staging = HostBuffers()
    first = staging.copy(snapshot)
    value += 1
    assert first.tensors["a"].tolist() == [0, 1, 2, 3]
    second = staging.copy(snapshot)
    assert second.tensors["a"].data_ptr() == first.tensors["a"].data_ptr() != value.data_ptr()
    assert second.tensors["a"].tolist() == [1, 2, 3, 4]
    bigger = staging.copy(Snapshot(2, {"a": torch.arange(9)}, None, {}, {}, {}))
    assert bigger.tensors["a"].tolist() == list(range(9)) and bigger.tensors["a"].dtype == torch.int64


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_from_the_gpu_goes_to_pinned_memory() -> None:
    value = torch.arange(1000.0, device="cuda")
    staged = HostBuffers().copy(Snapshot(1, {"a": value}, None, {}, {}, {}))
    value.zero_()
    assert staged.tensors["a"].is_pinned() and staged.tensors["a"].tolist() == list(range(1000))


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"keep": 9}, [1, 2, 3, 4]),
        ({"keep": 2}, [3, 4]),
        ({"keep": 1}, [4]),
        ({"keep": 9, "keep_hours": 4}, [3, 4]),
        ({"keep": 2, "keep_hours": 100}, [3, 4]),
        ({"keep": 2, "keep_hours": 1}, [4]),
    ],
    ids=str,
)
def test_those_that_are_too_many_or_too_old_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], left: list[int]
) -> None:
    for step, hours in ((1, 9), (2, 6), (3, 3)):
        with monkeypatch.context() as before:
            before.setattr(training_state, "Snapshot", partial(Snapshot, time=time.time() - hours * 3600))
            Made(tmp_path, keep=9).save(step)
    Made(tmp_path, **settings).save(4)
    assert [manifests.step_of(path.name) for path in sorted(tmp_path.glob("step-*"))] == left


def cut(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*/*.distcp")
    file.write_bytes(file.read_bytes()[:100])


def test_a_damaged_one_is_reported_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Made(tmp_path).save(1)
    Made(tmp_path).save(2)
    cut(tmp_path / "step-000002")
    one = Made(tmp_path)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert one.checkpointer.resume(one.state, "auto") == 1
    assert one.checkpointer.last is not None and one.checkpointer.last[1] == 1
    (told,) = one.events.named("checkpoint-damaged")
    assert told["path"].startswith(str(tmp_path / "step-000002")) and "is damaged and cannot be read" in told["reason"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert told["reason"] in line and "renamed it to" in line
    one.train()
    one.save(2)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("latest", "step-000001", "step-000002", "damaged-step-000002")
    }


def test_one_that_cannot_be_read_in_the_way_of_a_save_is_set_aside(tmp_path: Path) -> None:
    one = Made(tmp_path)
    one.save(1)
    (manifest,) = tmp_path.glob(f"step-000001/*/{manifests.FILE}")
    manifest.write_text("{")
    one.save(1)
    assert Made(tmp_path).checkpointer.resume(one.state, "auto") == 1
    assert (tmp_path / "damaged-step-000001").is_dir()


@pytest.mark.parametrize("resume", ["auto", None])
def test_a_folder_that_cannot_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: Any) -> None:
    one = Made(tmp_path)
    monkeypatch.setattr(one.checkpointer._storage, "complete", fail)
    with pytest.raises(CheckpointError, match=r"cannot be listed: .*the disk is gone"):
        one.checkpointer.resume(one.state, resume)


def test_all_are_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        Made(tmp_path).save(step)
    for step in (1, 2):
        cut(tmp_path / f"step-00000{step}")
    one = Made(tmp_path)
    with pytest.raises(CheckpointError, match=r"step-000002.* is damaged.*step-000001.* is damaged.*Remove") as caught:
        one.checkpointer.resume(one.state, "auto")
    assert type(caught.value) is CheckpointError
    assert (tmp_path / "step-000002").is_dir(), "nothing is renamed then"


@pytest.mark.parametrize(("rank", "kind"), [(0, "damaged"), (1, "damaged"), (1, "refused")])
def test_what_one_worker_cannot_read_no_worker_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, kind: str
) -> None:
    """The other worker cannot read the newest one; it tells so, and both go on from the one before."""
    Made(tmp_path).save(1)
    Made(tmp_path).save(2)
    one = Made(tmp_path, rank=rank, others=(None,))
    monkeypatch.setattr(resume, "_exchange", lambda world, content, reader: content)
    monkeypatch.setattr(resume, "Reader", lambda *_: load.Reader())  # all of it

    storage: Any = one.checkpointer._storage
    says: Iterator[Any] = iter([(3, "run"), storage.complete(), ""])  # rank 0: which launch, what is there, of one run

    def gather(value: Any, what: str) -> list[Any]:
        other = ("good", "", 0.0, False) if "000001" in what else (kind, "the disk is gone", 0.0, False)
        if what == "start":
            return [value or ("good", next(says))]
        return [value, other] if rank == 0 else [other, value]

    one.world.gather = gather
    if kind == "refused":
        with pytest.raises(CheckpointError, match="rank 0: the disk is gone"):
            one.checkpointer.resume(one.state, "auto")
        return
    assert one.checkpointer.resume(one.state, "auto") == 1
    assert (tmp_path / "damaged-step-000002").is_dir() == (rank == 0), "rank 0 renames"
    reasons = [told["reason"] for told in one.events.named("checkpoint-damaged")]
    assert reasons == (["rank 1: the disk is gone"] if rank == 0 else [])


def test_the_interval_follows_the_measured_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second, and a save in the background three."""
    now, write = [0.0], files.write_part

    def slow(*arguments: Any) -> files.CheckpointShard:
        now[0] += 3.0
        return write(*arguments)

    monkeypatch.setattr(files, "write_part", slow)
    monkeypatch.setattr(checkpointer, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    one = Made(tmp_path, every="auto")
    one.checkpointer._interval = Interval(1.0, lambda: now[0])
    due = []
    for step in range(1, 18):
        now[0] += 1.0
        if one.checkpointer.due(step):
            due.append(step)
            one.begin_save(step)
            one.checkpointer.finish()
    assert due == [10, 13, 16]
    (told,) = one.events.named("checkpoint-interval")
    assert (told["steps"], told["stall"], told["total"]) == (3, 0.0, 3.0)
    assert told["text"].startswith("checkpoint every 3 steps (3 s): a save stalls training for 0 s")


def test_the_others_leave_the_interval_to_rank_0(tmp_path: Path) -> None:
    one = Made(tmp_path, rank=1, every="auto")
    assert not any(one.checkpointer.due(step) for step in range(1, 40))
    one.world.rank = 0
    assert one.checkpointer.due(40), "a new rank 0 does not know how old the newest one is"


def key_file(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text * 32)
    return path


def test_with_a_key_only_what_it_signed_is_resumed_from(tmp_path: Path) -> None:
    key, other, saved = key_file(tmp_path / "key", "ab"), key_file(tmp_path / "other", "cd"), tmp_path / "saved"
    Made(saved, key_file=key).save(1)
    one = Made(saved, key_file=other)
    with pytest.raises(CheckpointError, match=r"step-000001/\S+ is refused: it is not signed with the key"):
        one.checkpointer.resume(one.state, "auto")
    plain = Made(saved)
    assert plain.checkpointer.resume(plain.state, "auto") == 1
    plain.train()
    plain.save(2)
    one = Made(saved, key_file=key)
    assert one.checkpointer.resume(one.state, "auto") == 1
    (told,) = one.events.named("checkpoint-damaged")
    assert "is refused: it is not signed, and checkpoint.key_file is set." in told["reason"]
    assert (saved / "damaged-step-000002").is_dir()


def test_an_unsigned_one_in_the_way_of_a_signed_save_is_set_aside(tmp_path: Path) -> None:
    one = Made(tmp_path / "saved")
    one.save(1)
    one.checkpointer._key = b"key"
    one.save(1)
    assert one.checkpointer.resume(one.state, "auto") == 1
    assert (tmp_path / "saved" / "damaged-step-000001").is_dir()


@pytest.mark.parametrize(("mode", "text"), [(0o644, "ab"), (0o600, "a"), (None, "")])
def test_a_key_that_is_none(tmp_path: Path, mode: int | None, text: str) -> None:
    if mode is not None:
        (tmp_path / "key").write_text(text * 20)
        (tmp_path / "key").chmod(mode)
    with pytest.raises(ConfigError, match=str(tmp_path / "key")):
        Made(tmp_path / "saved", key_file=tmp_path / "key")


def test_a_save_knows_how_long_to_retry_and_who_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    inner = checkpointer.save.save

    def save(about: Any, snapshot: Any, writer: Any, seconds: float, workers: int) -> Any:
        given.append((snapshot.step, seconds, workers))
        return inner(about, snapshot, writer, seconds, 1)

    monkeypatch.setattr(checkpointer.save, "save", save)
    one = Made(tmp_path, others=(None, None), retry_seconds=7.0)
    for divided in (False, True):
        one.checkpointer._divided = divided
        one.train()
        one.checkpointer._write(
            one.checkpointer._storage, one.state.snapshot(1 + divided), Writer(1, 0, "11111111"), 0.0, None
        )
    assert given == [(1, 7.0, 1), (2, 7.0, 3)]


@pytest.mark.parametrize(("every", "warned"), [(5, False), (7, True)])
def test_a_lost_save_of_a_later_step_is_made_again_when_it_is_due(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int, warned: bool
) -> None:
    """The workers have gone back behind it: a save by hand is not made again, so it is reported."""
    made = Made(tmp_path, every=every)
    made.checkpointer.made = made.checkpointer.saved_before = 10
    made.checkpointer.repeat_save(made.state, 8, lost=True, able=True)
    assert (made.checkpointer.made, made.checkpointer.saved_before) == (-1, None)
    assert ("The checkpoint of step 10 was lost" in caplog.text) == warned
    made.save(10)
    made.checkpointer.repeat_save(made.state, 8, lost=True, able=True)
    assert (made.checkpointer.made, made.checkpointer.saved_before) == (10, 10)
