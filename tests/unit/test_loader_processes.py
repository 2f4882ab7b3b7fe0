"""A loader process that has ended is named alike, however the loader of torch finds out."""

from collections.abc import Iterator

import pytest

from paceline.data.feed import _next


def fails(error: Exception) -> Iterator[None]:
    raise error
    yield


@pytest.mark.parametrize(
    "error",
    [EOFError(), ConnectionResetError(), RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")],
    ids=lambda error: type(error).__name__,
)
def test_a_loader_process_that_has_ended(error: Exception) -> None:
    with pytest.raises(RuntimeError, match=r"A loader process \(workers_per_loader\) ended: it was killed"):
        _next(fails(error))


def test_another_error_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="no such sample"):
        _next(fails(RuntimeError("no such sample")))
