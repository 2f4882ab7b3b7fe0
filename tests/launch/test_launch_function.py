"""``paceline.launch``: a function on many workers, from Python."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import ConfigError, RunFailed


def train(seed: int, steps: int) -> tuple[int, str]:
    torch.manual_seed(seed)
    data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
    session = paceline.start(
        model=torch.nn.Linear(4, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=torch.nn.functional.mse_loss,
        data=data,
        batch=12,
    )
    for batch in session.batches(steps=steps):
        session.step(batch)
    assert session._context.settings.exact
    return session.rank, session.fingerprint()


@pytest.mark.slow
def test_results_in_the_order_of_ranks(tmp_path: Path) -> None:
    def outer(seed: int) -> tuple[int, str]:  # a closure, as in a notebook
        return train(seed, steps)

    steps = 6
    results = paceline.launch(outer, 3, workers=3, runs_dir=tmp_path, settings={"exact": True})
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert len({fingerprint for _, fingerprint in results}) == 1
    (run,) = tmp_path.iterdir()  # the folder of the call is gone
    assert run.name.startswith("outer-") and (run / "launch.json").exists()


def fail(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        raise LookupError(f"rank {rank} has no such thing")
    train(3, 200)


@pytest.mark.slow
def test_the_first_cause_is_raised(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LookupError, match="rank 1 has no such thing") as caught:
        paceline.launch(fail, 1, workers=3, runs_dir=tmp_path, name="one", settings={"exact": True})
    assert "rank 1: LookupError" in caught.value.__notes__[0]


@pytest.mark.slow
def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    def die() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        train(3, 200)

    with pytest.raises(RunFailed, match="SIGKILL"):
        paceline.launch(die, workers=2, runs_dir=tmp_path, settings={"exact": True})


class Faltering(torch.utils.data.TensorDataset):
    """Its worker of rank 1 dies at the sixth step of the first call."""

    def __init__(self, mark: Path) -> None:
        random = torch.Generator().manual_seed(3)
        super().__init__(torch.randn(48, 4, generator=random), torch.randn(48, 1, generator=random))
        self._mark, self._taken = mark, 0

    def __getitem__(self, index: int) -> Any:
        self._taken += 1
        if os.environ.get("RANK") == "1" and self._taken > 30 and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)


def falter(mark: Path) -> str:
    torch.manual_seed(3)
    session = paceline.start(
        model=torch.nn.Linear(4, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=torch.nn.functional.mse_loss,
        data=Faltering(mark),
        batch=12,
        exact=True,
        checkpoint={"every": 1},
    )
    for batch in session.batches(steps=12):
        session.step(batch)
    return session.fingerprint()


@pytest.mark.slow(turns=6)
def test_a_failed_call_is_resumed_as_its_message_says(tmp_path: Path) -> None:
    call = partial(paceline.launch, falter, tmp_path / "mark", workers=2, runs_dir=tmp_path / "runs")
    with pytest.raises(RunFailed) as caught:
        call(name="one")
    assert "resume with: paceline.launch(..., name='one', settings={'resume': 'auto'})" in str(caught.value)
    assert len({*call(name="one", settings={"resume": "auto"}), *call(name="two", workers=1)}) == 1
    assert (tmp_path / "runs" / "one" / "checkpoints").exists()


def test_what_cannot_be_sent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be sent to the workers"):
        paceline.launch(threading.Lock().acquire, workers=2, runs_dir=tmp_path)
    with pytest.raises(TypeError, match="The function's result, a generator, cannot be sent back"):
        paceline.launch(lambda: (one for one in "ab"), workers=1, runs_dir=tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        *(
            {"on": "nowhere"},
            {"on": 3},
            {"colour": "red"},
            {"workers": 0},
            {"elastic": "3:2"},
            {"image": "x"},
            {"hosts": 3},
            {"gpus": "2"},
        ),
        *({"nodes": 2}, {"workers": "2"}, {"settings": 3}, {"elastic": 2}, {"name": 3}, {"patience": "1"}),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_used(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        paceline.launch(train, 3, 1, runs_dir=tmp_path, **given)
    assert not list(tmp_path.iterdir())


def test_debug_calls_it_here() -> None:
    assert paceline.launch(os.getpid, on="debug") == [os.getpid()]
    with pytest.raises(ConfigError, match="only worker, and workers is 2"):
        paceline.launch(os.getpid, workers=2, on="debug")
