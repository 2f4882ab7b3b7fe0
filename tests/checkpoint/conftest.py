"""Places for checkpoints: a folder, and two kinds of stores."""

from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest


@pytest.fixture(params=["path", "file://", "memory://"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[object], Path | str]]:
    """Makes a new place by its name."""

    def place(name: object) -> Path | str:
        where = tmp_path / str(name)
        return where if request.param == "path" else f"{request.param}{where}"

    yield place
    if request.param == "memory://":
        fsspec.filesystem("memory").rm("/", recursive=True)
