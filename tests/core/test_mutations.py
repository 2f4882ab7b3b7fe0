"""A spoilt checkpoint runs no code, hangs nobody, and is passed over with its reason (see mutations.py)."""

from pathlib import Path

import mutations
import pytest


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("store", "signed", "count"), [("", False, 36), ("file://", False, 12), ("memory://", False, 12), ("", True, 12)]
)
def test_a_spoilt_checkpoint_is_passed_over(tmp_path: Path, store: str, signed: bool, count: int) -> None:
    assert mutations.failures(tmp_path, range(count), store, signed) == []


@pytest.mark.slow
def test_more_of_them(tmp_path: Path) -> None:
    assert mutations.failures(tmp_path, range(100, 200)) == []
