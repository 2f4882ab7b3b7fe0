"""Data that grow in a session: what is refused, noticed, saved and seen, in one process and on three workers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.data import Growing
from paceline.errors import ConfigError, InputError

Pairs = list[tuple[torch.Tensor, int]]


def pairs(count: int) -> Pairs:
    return [(row, int(row[:4].argmax())) for row in torch.randn(count, 12)]


def start(data: Any, **more: Any) -> paceline.Session:
    torch.manual_seed(0)
    given = {"loss": torch.nn.functional.cross_entropy, "batch": 8, "exact": True} | more
    return paceline.start(model=torch.nn.Linear(12, 4), optimizer=partial(torch.optim.SGD, lr=0.1), data=data, **given)


def train(session: paceline.Session, **loop: int) -> list[int]:
    """The number of samples of each batch."""
    samples = []
    for batch in session.batches(**loop):
        session.step(batch)
        samples.append(batch.samples)
    return samples


def test_a_loop_over_several_epochs_has_the_samples_in_the_next_epoch() -> None:
    buffer = Growing()
    session = start(buffer)
    session.extend(pairs(10))
    assert len(buffer) == 10 and session.steps_per_epoch == 2
    seen = []
    for batch in session.batches(epochs=4):
        if batch.step == 2:
            session.extend(pairs(2))  # the batch of epoch 1 is there: epoch 2 has them
        session.step(batch)
        if batch.step in (0, 1):
            session.extend(pairs(3))
        seen.append((batch.epoch, batch.samples, batch.last))
    epochs = [[samples for epoch, samples, _ in seen if epoch == one] for one in range(4)]
    assert epochs == [[8, 2], [8, 8], [8, 8, 2], [8, 8, 2]] and len(buffer) == 18
    assert [last for *_, last in seen] == [False, True] * 2 + [False, False, True] * 2
    session.extend([])
    assert train(session) == [8, 8, 2] and len([*buffer]) == 18


class Noisy(torch.utils.data.Dataset[Any]):
    """A data set of a script that draws random numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, sample: int) -> Any:
        return torch.randn(12), sample % 4


def test_samples_are_added_to_a_data_set_that_draws() -> None:
    losses = []
    for data in (Growing(Noisy()), Noisy()):
        session = start(data)
        losses.append([session.step(batch).loss for batch in session.batches(epochs=2)])
    assert losses[0] == losses[1]
    session = start(grown := Growing(Noisy()))
    session.extend(pairs(4))
    assert train(session, epochs=2) == [8, 4, 8, 4] and len(grown) == 12


def test_a_checkpoint_after_an_addition_is_that_of_its_step(tmp_path: Path) -> None:
    """A second save of a step is the same state, and a resumed script adds the samples after this step again."""
    ends, known = [], []
    for folder, resume in ((tmp_path / "whole", None), (tmp_path / "again", "auto")):
        if resume is not None:
            shutil.copytree(tmp_path / "whole" / "step-000006", folder / "step-000006")
        torch.manual_seed(1)
        buffer = Growing(pairs(16))
        saves = {"directory": folder, "every": 2, "keep": 9, "background": False}
        session = start(buffer, resume=resume, checkpoint=saves)
        lengths = []
        for epoch in session.epochs(4):
            lengths.append((epoch, len(buffer)))
            session.extend(pairs(2))
            for batch in session.batches():
                session.step(batch)
            session.extend(pairs(2))
            session.save()
        ends.append((session.fingerprint(), session.position, len(buffer)))
        known.append(lengths)
    assert ends[0] == ends[1] and ends[0][2] == 32
    assert known == [[(0, 16), (1, 20), (2, 24), (3, 28)], [(1, 20), (2, 24), (3, 28)]], "epoch 1 ends with step 5"


def test_a_script_with_a_new_call_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    where = {"checkpoint": {"directory": tmp_path}}
    session = start(Growing(pairs(16)), **where)
    train(session, steps=3)
    session.save()
    session = start(Growing(pairs(16)), resume="auto", **where)
    with pytest.raises(InputError, match=r"session.extend after step -1: the run is at step 3 and has no such call"):
        session.extend(pairs(2))


def test_other_samples_before_training_are_refused_in_a_resume(tmp_path: Path) -> None:
    where = {"checkpoint": {"directory": tmp_path}}
    session = start(Growing(pairs(16)), **where)
    train(session, steps=1)
    session.save()
    with pytest.raises(paceline.CheckpointError, match=r"another order of samples: growing was 16 and is now 17"):
        start(Growing(pairs(17)), resume="auto", **where)


def carried(model: torch.nn.Module, microbatch: Any, state: Any) -> Any:
    return model(microbatch[0]).mean(), state


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"workers_per_loader": 2}, ConfigError, "a loader process does not see the samples that session.extend adds"),
        ({"sampler": lambda seed, epoch: range(16)}, ConfigError, "epochs of a Growing data set are shuffled"),
        ({"loss": None, "forward": carried}, ConfigError, "epochs of a Growing data set are shuffled"),
        ({"strategy": "backup", "exact": False, "backup": {"workers": 1}}, ConfigError, "epochs of one length"),
        ({"data": Growing((torch.zeros(9, 3), torch.zeros(9)))}, InputError, "The argument of Growing is a tuple of 2"),
    ],
)
def test_what_start_refuses(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        start(given.pop("data", Growing(pairs(16))), **given)


def test_what_a_session_refuses() -> None:
    session = start(buffer := Growing())
    with pytest.raises(InputError, match=r"The data set is empty: call session.extend\(samples\) before the first"):
        train(session)
    with pytest.raises(InputError, match="The data set is empty"):
        [*session.epochs(2)]
    session.extend(pairs(4))
    with pytest.raises(InputError, match=r"has 4 samples that an earlier session added.*Growing\(list\(earlier\)\)"):
        start(buffer)
    assert train(start(Growing([*buffer]))) == [4]
    session = start(pairs(16))
    with pytest.raises(ConfigError, match=r"give start\(data=paceline.data.Growing\(samples\)\)"):
        session.extend(pairs(1))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("sampler", [None, lambda seed, epoch: range(16)])
def test_a_data_set_that_changes_its_length_otherwise_is_noticed(wrapped: bool, sampler: Any) -> None:
    data = pairs(16)
    if wrapped and sampler is not None:
        return
    session = start(Growing(data) if wrapped else data, sampler=sampler)
    with pytest.raises(InputError, match=r"had 16 samples at the start and has 17 in step 3.*call session.extend"):
        for batch in session.batches(steps=9):
            session.step(batch)
            if batch.step == 2:
                data.append(data[0])


SCRIPT = """
import os
from functools import partial
import paceline, torch
from subjects import tell

torch.manual_seed(0)
rows = torch.randn(40, 4)
buffer = paceline.data.Growing([*rows[:8]])
session = paceline.start(
    model=torch.nn.Linear(4, 1), optimizer=partial(torch.optim.SGD, lr=0.1), data=buffer, batch=8, exact=True,
    forward=lambda model, microbatch: model(microbatch).square().mean(), timeout_seconds=30,
)

def raised(samples):
    try:
        session.extend(samples)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

wrong = []
for epoch in session.epochs(3):
    wrong.append(raised([rows[0], object()]))
    if session.workers > 1:
        wrong += [raised([*rows[: 2 + session.rank]]), raised([rows[0], rows[session.rank // 2], rows[2]])]
    session.extend([*rows[8 * epoch : 8 * epoch + 8]])
    for batch in session.batches():
        session.step(batch)
        if (epoch, session.rank, batch.last) == (1, int(os.environ.get("ALONE", -1)), True):
            session.extend([rows[0]])
tell(wrong=wrong[-3:], fingerprint=session.fingerprint(), length=len(buffer), value=session.evaluate(buffer))
"""


def test_three_workers_train_as_one_and_notice_other_samples(
    printed: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    for name in ("one", "three"):
        (tmp_path / name).mkdir()
    (alone,) = printed(SCRIPT, 1, tmp_path / "one")
    everyone = printed(SCRIPT, 3, tmp_path / "three")
    for one in everyone:
        assert all(one[name] == alone[name] for name in ("fingerprint", "length", "value")) and one["length"] == 32
        kind, numbers, other = one["wrong"]
        assert numbers.startswith(
            "DisagreementError: session.extend got different numbers of samples (rank 0 2, rank 1 3, rank 2 4). Give"
        )
        assert "different samples: sample 1 of 3 on rank 2 differs from rank 0's. Give the same list" in other
        assert "cannot keep sample 1 of 2: it is a builtins.object, which cannot be sent" in kind


def test_one_rank_alone_adds_samples(ranks: Callable[..., Any], tmp_path: Path) -> None:
    everyone = ranks(SCRIPT, 3, tmp_path, environment={"ALONE": "1"})
    for one in everyone:
        assert one.code == 3, one.out + one.err
        assert "session.synchronizing on ranks 0, 2" in one.err and "session.extend on rank 1" in one.err
