import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from launching import Ran, Run, check_nothing_is_left, launch

from paceline.testing.faults import Plan


@pytest.fixture
def run(fork_server: ForkServer, tmp_path: Path) -> Iterator[Run]:
    """Run a script with ``paceline run``; nothing of it may be left when the test ends."""

    def start(
        script: str,
        *words: object,
        arguments: Sequence[object] = (),
        faults: Plan | None = None,
        name: str = "one",
        deadline: float = 120.0,
        **environment: str,
    ) -> Ran:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(script))
        if faults is not None:
            environment |= faults.environment(tmp_path / "marks")
        given = ["run", "--quiet", "--name", name, *map(str, words), str(path), *map(str, arguments)]
        code, said = launch(fork_server, given, tmp_path, deadline, **environment)
        check_nothing_is_left(tmp_path)
        return Ran(code, said, tmp_path / "runs" / name)

    yield start
    check_nothing_is_left(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What comes out of a script in one process to which nothing happens; each is run once."""
    known: dict[str, dict[str, Any]] = {}

    def of(script: str, arguments: Sequence[object] = (), **environment: str) -> dict[str, Any]:
        key = json.dumps((script, arguments, environment))
        if key not in known:
            directory = tmp_path_factory.mktemp("undisturbed")
            (directory / "train.py").write_text(textwrap.dedent(script))
            words = ["run", "--quiet", "--name", "one", str(directory / "train.py"), *map(str, arguments)]
            code, said = launch(fork_server, words, directory, 60.0, ALONE="1", **environment)
            ran = Ran(code, said, directory / "runs" / "one")
            assert code == 0, ran.report()
            (known[key],) = ran.printed()
        return known[key]

    return of
