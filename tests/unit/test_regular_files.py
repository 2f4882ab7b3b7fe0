"""Readers of a run's files refuse what is no file, and never wait for it."""

import os
import socket
from pathlib import Path

import pytest

from paceline.errors import InputError
from paceline.launchers import runs
from paceline.observe import ledger, records
from paceline.system.regular_files import NotRegularError, open_regular, read_text


def odd(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        monkeypatch.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    elif kind == "a directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "a device" else __file__)
    return path


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a directory", "a device", "a symbolic link"])
def test_only_regular_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = odd(tmp_path / "file", kind, monkeypatch)
    with pytest.raises(NotRegularError, match=f"{kind}, not a regular file"):
        open_regular(path, links=kind == "a device")


def test_links_are_followed_where_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "content"


def test_a_pipe_among_the_records_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    os.mkfifo(tmp_path / "events" / "rank-0.jsonl")
    os.mkfifo(tmp_path / "launch.json")
    with pytest.raises(InputError, match=r"rank-0.jsonl cannot be read: a pipe, not a regular file"):
        list(records.read(tmp_path, {"step"}))
    with pytest.raises(NotRegularError):
        ledger.read(tmp_path / "events")
    assert runs.newest_checkpoint(tmp_path) is None
    assert runs.newest_resumable(tmp_path.parent, Path("train.py")) is None
