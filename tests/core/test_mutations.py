"""A spoilt checkpoint runs no code, hangs nobody, and is passed over with its reason (see mutations.py)."""

from pathlib import Path

import mutations
import pytest


@pytest.mark.parametrize("store", ["", "file://", "memory://"])
def test_a_spoilt_checkpoint_is_passed_over(tmp_path: Path, store: str) -> None:
    assert mutations.failures(tmp_path, range(12 if store else 36), store) == []


@pytest.mark.slow
def test_more_of_them(tmp_path: Path) -> None:
    assert mutations.failures(tmp_path, range(100, 200)) == []
