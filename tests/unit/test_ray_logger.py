"""What workers log comes to the callbacks of the call: all of it, in order, and once."""

from pathlib import Path

import pytest

from paceline.horovod.ray import ray_logger
from paceline.horovod.ray.ray_logger import Folder, follow, log


def test_values_come_to_the_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_logger, "_queue", Folder(tmp_path))
    heard: list[object] = []
    with follow(Folder(tmp_path), [heard.append]):
        for rank in ("0", "1"):
            monkeypatch.setenv("HOROVOD_RANK", rank)
            for number in range(20):
                log((rank, number))
        log("all", chief_only=False)
    assert heard == [*(("0", number) for number in range(20)), "all"]
    assert not list(tmp_path.iterdir())


def test_an_exception_of_a_callback_is_raised(tmp_path: Path) -> None:
    Folder(tmp_path).put("zero")
    with pytest.raises(ValueError, match="zero"), follow(Folder(tmp_path), [int]):
        pass


def test_a_call_without_callbacks_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    with pytest.warns(UserWarning, match="the call has no callbacks"):
        log({"loss": 1.0})
