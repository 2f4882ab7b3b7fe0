"""A divided optimizer state is saved and hashed with the bytes of the whole one, and errors of a save end it alike."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from thread_world import ThreadWorld, run

from paceline.checkpoint import files, load
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.tensors import StreamedTensors, fingerprint, optimizer_state
from paceline.checkpoint.training_state import TrainingState
from paceline.errors import CheckpointError, InputError
from paceline.events import EventLog
from paceline.schedule.slices import slice_name
from paceline.settings import CheckpointSettings
from paceline.step.divided import tensors as divided_tensors
from paceline.step.divided.optimizer_state import DividedOptimizerState


class Held:
    """A worker with all weights, and every other slice of 64 elements of each moment."""

    def __init__(self, world: ThreadWorld, directory: Path, **settings: Any) -> None:
        self.model = torch.nn.Linear(30, 20)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for number, value in enumerate(self.model.parameters()):
            value.data = torch.linspace(-1, 1, value.numel()).view_as(value)
            value.grad = value.detach() * number
        self.optimizer.step()
        self.whole = dict(optimizer_state(self.model, self.optimizer))
        self.state = self._state()
        self.fingerprint = self.state.fingerprint()
        self.optimizer.state.clear()
        own: dict[str, torch.Tensor] = {}
        for name, value in self.whole.items():
            flat = value.reshape(-1)
            places = range(64 * world.rank, len(flat), 128) if value.ndim else ()
            own |= {slice_name(name, at, min(at + 64, len(flat))): flat[at : at + 64] for at in places}
        own |= {name: value for name, value in self.whole.items() if not value.ndim}
        self.update: Any = SimpleNamespace(parameters=dict(self.model.named_parameters()), row_states={})
        context: Any = SimpleNamespace(world=world, update=self.update)
        self.share = DividedOptimizerState(context, lambda: own)
        self.state.divided = lambda: self.share
        given = CheckpointSettings(directory=str(directory), **settings)
        self.checkpointer = Checkpointer(world, given, None, EventLog(None, world.rank))  # type: ignore[arg-type]
        self.checkpointer.launch = 1

    def _state(self) -> TrainingState:
        update: Any = SimpleNamespace(optimizer=self.optimizer, schedule=None, kind="AdamW", other_names=str)
        return TrainingState(self.model, update, {"batch": 8}, {"exact": False}, {"torch": "2"}, {})


def check(directory: Path, whole: Mapping[str, torch.Tensor], wanted: str) -> None:
    (path,) = directory.glob("step-000003/*/manifest.json")
    content = load.read(path.parent, lambda *_: None)
    assert content.manifest.fingerprint == wanted == fingerprint(content.tensors)
    assert all(torch.equal(content.tensors[name], value) for name, value in whole.items())


@pytest.mark.parametrize("background", [False, True, None])
def test_a_save_has_the_bytes_of_the_whole_state(
    tmp_path: Path, background: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divided_tensors, "ROUND_BYTES", 1000)

    def act(world: Any) -> tuple[str, Mapping[str, torch.Tensor]]:
        one = Held(world, tmp_path / "saved", background=background)
        one.checkpointer.begin_save(one.state, 3)
        one.checkpointer.finish()
        assert bool(one.checkpointer._buffers._buffers) == (bool(background) and world.rank == 0)
        with pytest.raises(InputError, match="have not hashed it since the last step"):
            one.state.fingerprint()
        one.share.hash()
        assert one.state.fingerprint() == one.fingerprint
        assert not one.optimizer.state
        one.checkpointer.save(one.state, 3)  # finds the same state there
        return one.fingerprint, one.whole

    (first, whole), (second, _) = run(2, act)
    assert first == second
    check(tmp_path / "saved", whole, first)


@pytest.mark.parametrize("passes", [True, False])
def test_a_save_that_fails_in_the_middle(tmp_path: Path, passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again with all tensors, or the other workers go on, as after a save that they have no part in."""
    monkeypatch.setattr(divided_tensors, "ROUND_BYTES", 1000)
    write, tries = files.write_part, []

    def failing(create: Any, name: str, state: Mapping[str, torch.Tensor], known: dict[str, str]) -> Any:
        tries.append(name)
        if len(tries) == 1 or not passes:
            next(iter(files.each(state)))
            raise OSError(errno.EIO if passes else errno.EROFS, "the disk is gone")
        return write(create, name, state, known)

    monkeypatch.setattr(files, "write_part", failing)

    def act(world: Any) -> tuple[str, Mapping[str, torch.Tensor]]:
        one = Held(world, tmp_path / "saved", retry_seconds=20 if passes else 0.1)
        if passes or world.rank:
            one.checkpointer.save(one.state, 3)
        else:
            with pytest.raises(CheckpointError, match="the disk is gone"):
                one.checkpointer.save(one.state, 3)
        assert world.gather("still together", "") == ["still together"] * 2
        return one.fingerprint, one.whole

    (wanted, whole), _ = run(2, act)
    if passes:
        check(tmp_path / "saved", whole, wanted)


@pytest.mark.parametrize("background", [False, True])
def test_a_save_after_one_that_has_failed(tmp_path: Path, background: bool) -> None:
    """Rank 0 raises the error of the earlier save before it collects anything, and the other workers go on."""

    def fail() -> None:
        raise CheckpointError("the disk is gone")

    def act(world: Any) -> None:
        one = Held(world, tmp_path / "saved", background=background)
        save = one.checkpointer.begin_save if background else one.checkpointer.save
        if world.rank:
            save(one.state, 3)
        else:
            one.checkpointer._background.start(fail)
            with pytest.raises(CheckpointError, match="the disk is gone"):
                save(one.state, 3)
        assert world.gather("still together", "") == ["still together"] * 2

    run(2, act)


def test_a_written_tensor_is_freed_before_the_next_one_arrives(tmp_path: Path) -> None:
    """Rank 0 has no memory for two large tensors of the others."""
    kinds = {name: (torch.float32, torch.Size([5])) for name in "abc"}

    def receive(names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            received = torch.ones(5)
            before = ref(received)
            yield name, received
            del received
            assert before() is None, name

    part = files.write_part(lambda name: (tmp_path / name).open("wb"), "part", StreamedTensors({}, kinds, receive), {})
    assert list(part.offsets) == ["a", "b", "c"]
