"""Begin to import torch for the workers while the command line is still being read.

What the launcher itself imports and checks takes a third of a second. Until then the number of threads, which libraries
read when they are loaded, is a guess from the plain text of the settings; the launcher starts anew if it was wrong.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.environments import env
from paceline.launchers import machine
from paceline.launchers.base import library_variables
from paceline.launchers.registry import LAUNCHERS

_TRUE = ("true", "1", "yes", "on")


def begin(launcher: str, script: Path, arguments: Sequence[str], workers: int, settings: Sequence[str]) -> None:
    """Let a launcher begin, if what it will need is known already.

    Args:
        launcher: a name in the registry.
        script: of the workers.
        arguments: of the script.
        workers: of this machine.
        settings: pairs ``key=value`` of the command line.
    """
    here = machine.look()
    if launcher not in LAUNCHERS or env.plan_file() is not None or len(here.domains) > 1 or not script.is_file():
        return
    inherited = env.inherited()
    threads, chosen = guess_threads(settings, inherited, max(1, len(here.cores) // max(1, workers)))
    variables = {**library_variables(threads), **inherited, **({"OMP_NUM_THREADS": str(threads)} if chosen else {})}
    LAUNCHERS[launcher].begin_early((sys.executable, "-u", str(script), *arguments), variables)


def guess_threads(settings: Sequence[str], environment: Mapping[str, str], usual: int) -> tuple[int, bool]:
    """Guess the number of threads of a worker, and whether the user has chosen it.

    Args:
        settings: pairs ``key=value`` of the command line.
        environment: of this process.
        usual: without a setting.
    """
    given = dict(one.partition("=")[::2] for one in settings)
    threads = given.get("threads", environment.get("PACELINE_THREADS", ""))
    if threads.isdecimal():
        return int(threads), True
    exact = given.get("exact", environment.get("PACELINE_EXACT", ""))
    return (1 if exact.lower() in _TRUE else usual), False


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """At the end of the block, end what has begun early and was not needed."""
    try:
        yield
    finally:
        for one in LAUNCHERS.values():
            one.end_early()
