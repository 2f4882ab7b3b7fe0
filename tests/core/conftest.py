import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from warm import Warm

from paceline.testing.ranks import Ended, run

Run = Callable[..., list[Ended]]


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """The process that starts the workers of these tests."""
    with Warm() as process:
        yield process


@pytest.fixture(scope="session")
def ranks(warm: Warm) -> Run:
    """``paceline.testing.ranks.run``, with a quick start of each worker."""

    def start(script: str | Path, workers: int, directory: Path, **options: Any) -> list[Ended]:
        return run(script, workers, directory, start=warm.start, **options)

    return start


@pytest.fixture(scope="session")
def told(ranks: Run) -> Callable[..., list[dict[str, Any]]]:
    """Run a script that must end well; all that each worker told, put together."""

    def start(script: str | Path, workers: int, directory: Path, **options: Any) -> list[dict[str, Any]]:
        everyone = ranks(script, workers, directory, **options)
        assert [one.code for one in everyone] == [0] * workers, "\n".join(one.out + one.err for one in everyone)
        found = []
        for one in everyone:
            values: dict[str, Any] = {}
            for line in one.out.splitlines():
                if line.startswith("{"):
                    values.update(json.loads(line))
            found.append(values)
        return found

    return start
