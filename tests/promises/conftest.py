"""Runs that several promises share: the same call of a script is made once."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fork_server import ForkServer
from launching import Ran, check_nothing_is_left, launch
from patience import DEADLINE

from paceline.testing.faults import Plan

Launched = Callable[..., Ran]
Reported = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def launched(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Run a script with ``paceline run`` in a folder of its own, and return what the run left.

    A call with ``after`` goes on in the folder of an earlier run.
    """
    known: dict[str, Ran] = {}

    def start(
        script: str,
        *words: object,
        faults: Plan | None = None,
        arguments: Sequence[object] = (),
        after: Ran | None = None,
        quiet: bool = True,
        **environment: str,
    ) -> Ran:
        key = repr((script, words, faults, arguments, after and after.run, quiet, environment))
        if key not in known:
            directory = tmp_path_factory.mktemp("run") if after is None else after.run.parents[1]
            (directory / "train.py").write_text(textwrap.dedent(script))
            if faults is not None:
                environment = environment | faults.environment(directory / "marks")
            given = [
                "run",
                *(["--quiet"] if quiet else []),
                "--name",
                "one",
                *words,
                directory / "train.py",
                *arguments,
            ]
            code, said = launch(fork_server, list(map(str, given)), directory, DEADLINE, **environment)
            check_nothing_is_left(directory)
            known[key] = Ran(code, said, directory / "runs" / "one")
        return known[key]

    return start


@pytest.fixture(scope="session")
def reported(printed: Reported, tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """Run a script on several workers without a launcher, and return what each worker told."""
    known: dict[str, list[dict[str, Any]]] = {}

    def start(script: str, workers: int, **options: Any) -> list[dict[str, Any]]:
        key = json.dumps((script, workers, options), default=repr)
        if key not in known:
            directory = tmp_path_factory.mktemp("told")
            options = {"deadline": DEADLINE, **options}
            known[key] = printed(script.replace("FOLDER", repr(str(directory))), workers, directory, **options)
        return known[key]

    return start
