"""The examples in docstrings are true."""

import doctest
import importlib
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
ELSEWHERE = {"paceline.checkpoint.parts", "paceline.comm.collectives.exchange"}
"""Their examples need names that a test gives them."""
HOROVOD = "paceline.horovod.torch"
"""The examples of its modules start workers."""
MODULES = sorted(
    ".".join(("paceline", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if "\n    >>> " in path.read_text() or "\n        >>> " in path.read_text()
)


@pytest.mark.parametrize("name", [one for one in MODULES if one not in ELSEWHERE and HOROVOD not in one])
def test_the_examples_are_true(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(name))
    assert tried.attempted > 0 and tried.failed == 0
