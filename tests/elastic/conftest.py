import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from launchers import Launchers, Ran, Run, check_nothing_is_left

from paceline.testing.faults import Plan


@pytest.fixture(scope="session")
def launchers() -> Iterator[Launchers]:
    with Launchers() as started:
        yield started


@pytest.fixture
def run(launchers: Launchers, tmp_path: Path) -> Iterator[Run]:
    """Run a script with ``paceline run``; nothing of it may be left when the test ends."""

    def start(
        script: str,
        *words: object,
        arguments: Sequence[object] = (),
        faults: Plan | None = None,
        name: str = "one",
        deadline: float = 60.0,
        **environment: str,
    ) -> Ran:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(script))
        if faults is not None:
            environment |= faults.environment(tmp_path / "marks")
        given = ["run", "--quiet", "--name", name, *map(str, words), str(path), *map(str, arguments)]
        code, said = launchers.run(given, tmp_path, environment, deadline)
        check_nothing_is_left(tmp_path)
        return Ran(code, said, tmp_path / "runs" / name)

    yield start
    check_nothing_is_left(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(launchers: Launchers, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What comes out of a script in one process to which nothing happens; each is run once."""
    known: dict[str, dict[str, Any]] = {}

    def of(script: str, arguments: Sequence[object] = (), **environment: str) -> dict[str, Any]:
        key = json.dumps((script, arguments, environment))
        if key not in known:
            directory = tmp_path_factory.mktemp("undisturbed")
            (directory / "train.py").write_text(textwrap.dedent(script))
            words = ["run", "--quiet", "--name", "one", str(directory / "train.py"), *map(str, arguments)]
            code, said = launchers.run(words, directory, {"ALONE": "1", **environment}, 60.0)
            ran = Ran(code, said, directory / "runs" / "one")
            assert code == 0, ran.story()
            (known[key],) = ran.told()
        return known[key]

    return of
