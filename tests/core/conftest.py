import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

from paceline.testing.ranks import Ended, run

Run = Callable[..., list[Ended]]


@pytest.fixture(scope="session")
def ranks(fork_server: ForkServer) -> Run:
    """``paceline.testing.ranks.run``, with a quick start of each worker."""

    def start(script: str | Path, workers: int, directory: Path, **options: Any) -> list[Ended]:
        return run(script, workers, directory, start=fork_server.start_workers, **options)

    return start


@pytest.fixture(scope="session")
def printed(ranks: Run) -> Callable[..., list[dict[str, Any]]]:
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
