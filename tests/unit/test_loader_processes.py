"""A loader process that has ended is named alike, however the loader of torch finds out."""

import pytest

from paceline.data.feed import has_ended


@pytest.mark.parametrize(
    "error",
    [EOFError(), ConnectionResetError(), RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")],
    ids=lambda error: type(error).__name__,
)
def test_a_loader_process_that_has_ended(error: Exception) -> None:
    assert has_ended(error)


@pytest.mark.parametrize("kind", [EOFError, ConnectionResetError, RuntimeError])
def test_another_error_is_raised_as_it_is(kind: type[Exception]) -> None:
    assert not has_ended(kind("Caught an error in DataLoader worker process 0.\nOriginal Traceback"))
    assert not has_ended(RuntimeError("no such sample"))
