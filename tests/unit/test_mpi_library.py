"""What is said where MPI, or mpi4py, is not there."""

from __future__ import annotations

import pytest

from paceline.comm.mpi import library
from paceline.errors import StartError


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (ModuleNotFoundError("No module named 'mpi4py'"), r"pip install 'paceline\[mpi\]'"),
        (RuntimeError("libmpi.so.12: cannot open shared object file"), "libmpich.so.12 of Debian, put a link"),
    ],
    ids=["no mpi4py", "another name"],
)
def test_what_is_missing(error: Exception, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise error

    monkeypatch.setattr(library, "load", load)
    with pytest.raises(StartError, match=fix) as told:
        library.initialized.__wrapped__()
    assert str(error) in str(told.value)
