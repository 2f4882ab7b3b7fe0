"""Early import of torch for the workers, while the command line is still being parsed.

The launcher's own imports and checks take a third of a second. Until they are done, the number of threads, which
libraries read at load time, is guessed from the text of the settings. A wrong guess costs a second import.
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
    """Call the launcher's ``begin_early`` if its command and environment can already be predicted."""
    here = machine.measure()
    if launcher not in LAUNCHERS or env.plan_file() is not None or len(here.domains) > 1 or not script.is_file():
        return
    inherited = env.inherited()
    threads, chosen = guess_threads(settings, inherited, max(1, len(here.cores) // max(1, workers)))
    variables = {**library_variables(threads), **inherited, **({"OMP_NUM_THREADS": str(threads)} if chosen else {})}
    LAUNCHERS[launcher].begin_early((sys.executable, "-u", str(script), *arguments), variables)


def guess_threads(settings: Sequence[str], environment: Mapping[str, str], usual: int) -> tuple[int, bool]:
    """Guess the number of threads per worker. Return it and whether the user has set it."""
    given = dict(one.partition("=")[::2] for one in settings)
    threads = given.get("threads", environment.get("PACELINE_THREADS", ""))
    if threads.isdecimal():
        return int(threads), True
    exact = given.get("exact", environment.get("PACELINE_EXACT", ""))
    return (1 if exact.lower() in _TRUE else usual), False


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Discard unused early preparations of all launchers at the end of the block."""
    try:
        yield
    finally:
        for one in LAUNCHERS.values():
            one.end_early()
