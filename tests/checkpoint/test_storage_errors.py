"""A storage that fails says nothing about what it holds: nothing is renamed or lost, and it is tried again."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interleaving import Interleaving, Killed, save_alone
from test_two_writers import ALONE, NEXT, OLD, check_whole, snapshot

from paceline.checkpoint.resume import read_newest
from paceline.checkpoint.save import retain
from paceline.checkpoint.storage.base import FENCED, Storage, split
from paceline.checkpoint.storage.locations import storage_at
from paceline.checkpoint.storage.retry import is_storage_error, may_pass
from paceline.errors import CheckpointError


class UnavailableError(Exception):
    """What the client of a store raises."""

    __module__ = "client.errors"
    status = 503


ERRORS: dict[str, Callable[[], Exception]] = {
    "EIO": lambda: OSError(errno.EIO, "Input/output error"),
    "ESTALE": lambda: OSError(errno.ESTALE, "Stale file handle"),
    "503": lambda: UnavailableError("Service Unavailable"),
    "timeout": lambda: TimeoutError("timed out"),
}


def begin(place: Path | str) -> Storage:
    storage = storage_at(place)
    for step in (2, 4):
        save_alone(storage, snapshot(step, OLD), OLD, 60)
    return storage


def saves(storage: Storage) -> None:
    save_alone(storage, snapshot(6, OLD), OLD, 300)


def reads(storage: Storage) -> None:
    search = read_newest(ALONE, storage, lambda *_: None, 300)
    assert search.content is not None and search.content.manifest.step == 4
    assert not search.damaged and not search.missing


def steps(storage: Storage) -> list[str]:
    for name in storage.complete():
        check_whole(storage.location(name))
    return [split(name)[0] for name in storage.complete()]


def run(act: Callable[[Storage], None], storage: Storage, patch: pytest.MonkeyPatch, fault: Any) -> Interleaving:
    """Do it alone, with faults that depend on the number of the operation and on the clock; its error is raised."""
    turns: Interleaving
    turns = Interleaving(0, patch, lambda *_: fault(len(turns.operations) - 1, turns.now))
    (one,) = turns.run({"one": lambda: act(storage)}, lambda: None).values()
    if one.error is not None:
        raise one.error
    return turns


@pytest.mark.parametrize("first", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in range(1, 4))])
@pytest.mark.parametrize("act", [saves, reads])
def test_an_error_once_at_any_operation(places: Any, act: Any, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        count = len(run(act, begin(places("whole")), patch, lambda *_: None).operations)
    assert count > 5
    for bad in range(first, count, 4):
        storage = begin(places(bad))
        error = list(ERRORS.values())[(bad + bad // 4) % len(ERRORS)]

        def once(number: int, _: float, bad: int = bad, error: Callable[[], Exception] = error) -> None:
            if number == bad:
                raise error()

        with monkeypatch.context() as patch:
            run(act, storage, patch, once)
        assert steps(storage) == ["step-000006"] * (act is saves) + ["step-000004", "step-000002"]


def removes(storage: Storage) -> None:
    retain(storage, 4, OLD, 1, None)


@pytest.mark.sampled(1)
def test_a_removal_that_was_killed_is_completed(places: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any operation; by the next writer, after its next save."""
    with monkeypatch.context() as patch:
        count = len(run(removes, begin(places("whole")), patch, lambda *_: None).operations)
    assert count > 5
    for last in range(count):
        storage, later = begin(places(last)), NEXT["another launch"]

        def kill(number: int, _: float, last: int = last) -> None:
            if number >= last:
                raise Killed

        with monkeypatch.context() as patch:
            run(removes, storage, patch, kill)
        save_alone(storage, snapshot(6, later), later, 60)
        retain(storage, 6, later, 2, None)
        assert steps(storage) == ["step-000006", "step-000004"], last
        left = set(storage.names()) - {"step-000006", "step-000004", "latest", ".writers"}
        for step in left:  # the mark that a writer may still come back to it
            (attempt,) = storage.attempts(step)
            assert storage.files_of(attempt) == [FENCED], last


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("act", [saves, reads])
def test_errors_for_a_minute(places: Any, act: Any, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = begin(places("here"))

    def minute(_: int, now: float) -> None:
        if now < 60:
            raise ERRORS[error]()

    with monkeypatch.context() as patch:
        run(act, storage, patch, minute)
    assert steps(storage) == ["step-000006"] * (act is saves) + ["step-000004", "step-000002"]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("act", [saves, reads])
def test_errors_for_too_long(places: Any, act: Any, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the path, the cause and the time; everything stays as it was."""
    storage = begin(places("here"))

    def always(number: int, _: float) -> None:
        if number > 3:
            raise ERRORS[error]()

    with monkeypatch.context() as patch, pytest.raises(CheckpointError) as caught:
        run(act, storage, patch, always)
    said = str(caught.value)
    assert str(storage.location()) in said and str(ERRORS[error]()).split("] ")[-1] in said
    assert "(tried for 300 s)" in said
    assert steps(storage) == ["step-000004", "step-000002"]
    reads(storage)


def test_a_file_that_is_not_there_yet(places: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network folder may show a file, or a step, later; after a while the checkpoint is passed over, and stays."""
    storage = begin(places("here"))
    name = storage.complete()[0]
    opens, complete = type(storage).open, type(storage).complete

    def late(until: float, turns: Any) -> Any:
        def opened(self: Storage, name: str, file: str) -> Any:
            if "step-000004" in str(self.location(name)) and file.startswith("__") and turns[0].now < until:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", file)
            return opens(self, name, file)  # type: ignore[arg-type]

        return opened

    for until, found in ((20.0, 4), (1e9, 2)):
        with monkeypatch.context() as patch:
            turns: list[Any] = []
            patch.setattr(type(storage), "open", late(until, turns))
            turns.append(Interleaving(0, patch))
            search = read_newest(ALONE, storage, lambda *_: None, 300)
            assert search.content is not None and search.content.manifest.step == found
            assert not search.damaged and len(search.missing) == (found == 2)
    with monkeypatch.context() as patch:
        turns = [Interleaving(0, patch)]
        patch.setattr(type(storage), "complete", lambda self: complete(self)[turns[0].now < 5.0 :])
        search = read_newest(ALONE, storage, lambda *_: None, 300)
        assert search.content is not None and search.content.manifest.step == 4, "latest says that there is one"
    assert storage.complete()[0] == name


def test_what_may_pass() -> None:
    forbidden, refused = UnavailableError(), OSError(errno.EACCES, "Permission denied")
    forbidden.status = 403
    for error in (forbidden, refused, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        assert is_storage_error(error) and not may_pass(error)
    for error in (UnavailableError(), ConnectionResetError(), RuntimeError("in a client"), ValueError("no such field")):
        assert may_pass(error) == is_storage_error(error) == isinstance(error, UnavailableError | OSError)
    wrapped = RuntimeError("cannot read")
    wrapped.__cause__ = OSError(errno.EIO, "Input/output error")
    assert may_pass(wrapped)
