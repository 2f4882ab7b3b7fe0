"""A signal is a notice to the worker, and ends a process that its script forked."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.training.recovery.preemption import catch_notices, release_notices


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def world(asked: list[str], name: str = "") -> Any:
    return SimpleNamespace(request_leave=lambda: asked.append(name))


def test_a_process_that_the_script_forks_ends() -> None:
    asked: list[str] = []
    catch_notices(world(asked))
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert asked == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked == [""]


def test_the_notice_goes_to_the_latest_session() -> None:
    asked: list[str] = []
    for name in ("first", "second"):
        catch_notices(world(asked, name))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert asked == ["second"]


def test_a_handler_of_the_script_is_kept() -> None:
    asked, kept = list[str](), list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: kept.append(number))
    catch_notices(world(asked))
    os.kill(os.getpid(), signal.SIGTERM)
    assert (asked, kept) == ([], [signal.SIGTERM])


def test_a_handler_that_is_not_of_python_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """``getsignal`` returns None for it."""
    monkeypatch.setattr("paceline.training.recovery.preemption._handlers", {})
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("it was replaced"))
    catch_notices(world([]))


def test_a_session_that_has_closed_catches_nothing() -> None:
    catch_notices(world([]))
    release_notices()
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_handler_that_the_script_has_installed_since_stays() -> None:
    asked, kept = list[str](), list[int]()
    catch_notices(world(asked))
    signal.signal(signal.SIGTERM, lambda number, frame: kept.append(number))
    release_notices()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (asked, kept) == ([], [signal.SIGTERM])


def test_a_second_session_without_checkpoints_ends_on_a_signal(tmp_path: Path) -> None:
    """The second session has no step that reads a notice, so none must stay with the handler of the first."""
    session = None
    for more in ({"checkpoint": {"directory": tmp_path}}, {}):
        given: dict[str, Any] = {"loss": nn.functional.mse_loss, "batch": 2, **more}
        data = TensorDataset(torch.zeros(4, 2), torch.zeros(4, 2))
        optimizer = partial(torch.optim.SGD, lr=0.1)
        session = paceline.start(model=nn.Linear(2, 2), optimizer=optimizer, data=data, **given)
        assert (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL) == (not more)
    assert session is not None
