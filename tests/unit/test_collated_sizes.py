"""A collate function that leaves samples out changes the weights of the others, and there is a warning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import paceline
from paceline.data.nested import CollatedSizes

Pair = tuple[torch.Tensor, torch.Tensor]
DATA: list[Pair | None] = [(torch.full((8,), float(n)), torch.tensor(n % 3)) if n % 5 else None for n in range(64)]
cross_entropy = torch.nn.functional.cross_entropy


def without_none(items: list[Pair | None]) -> Any:
    return torch.utils.data.default_collate([item for item in items if item is not None])


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output, target)


def total(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return cross_entropy(output, target, reduction="sum"), len(target)


def trained(loss: Callable[..., Any], data: Any = DATA, collate: Callable[..., Any] = without_none) -> paceline.Session:
    session = paceline.start(
        model=torch.nn.Linear(8, 3),
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        loss=loss,
        data=data,
        collate=collate,
        batch=32,
    )
    for batch in session.batches():
        session.step(batch)
    return session


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "ollate function" in one.getMessage()]


def test_a_mean_over_what_is_left_is_another_mean(caplog: pytest.LogCaptureFixture) -> None:
    session = trained(mean)
    (text,) = warnings(caplog)
    assert text.startswith("The collate function returned ") and "Return the loss as the pair (sum, count)" in text
    session.evaluate(DATA, mean)
    session.evaluate(DATA)
    _, text = warnings(caplog)
    assert text.startswith("evaluate: the collate function returned ") and "return the pair (sum, count)" in text


def test_a_sum_and_its_count_are_right(caplog: pytest.LogCaptureFixture) -> None:
    trained(total).evaluate(DATA, total)
    assert warnings(caplog) == []


def test_pairs_are_right_for_microbatches_that_are_whole_again(caplog: pytest.LogCaptureFixture) -> None:
    rare = [item if number != 3 else None for number, item in enumerate(DATA[1:5] * 16)]
    trained(total, rare).evaluate(rare, {"loss": None, "total": total})
    assert warnings(caplog) == []


def test_a_collate_function_that_keeps_all(caplog: pytest.LogCaptureFixture) -> None:
    whole = [item for item in DATA if item is not None]
    trained(mean, whole).evaluate(whole, mean)
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("shapes", "uneven"),
    [
        ([(4, [(4, 8), (4,)]), (3, [(3, 8), (3,)])], ""),
        ([(4, [(4, 8), (4,)]), (4, [(3, 8), (3,)])], "3 samples for 4 items in one microbatch and 4 for 4 in another"),
        ([(4, [(3, 8), (3,)]), (4, [(3, 8), (3,)])], ""),
        ([(4, [(8, 5)]), (2, [(4, 5)])], ""),  # two views of each sample
        ([(4, [(8, 5)]), (2, [(5, 5)])], "5 samples for 2 items in one microbatch and 8 for 4 in another"),
        ([(4, [(9, 4), (7, 4)]), (4, [(5, 4), (6, 4)])], ""),  # the time first
        ([(4, [(9, 4), (9, 4)]), (4, [(5, 4), (5, 4)])], ""),
        ([(4, [(9, 3), (4,)]), (4, [(5, 3), (4,)])], ""),  # the nodes of graphs, with a target for each graph
        ([(4, [()]), (4, [()])], ""),
    ],
)
def test_sizes(shapes: list[tuple[int, list[tuple[int, ...]]]], uneven: str) -> None:
    sizes = CollatedSizes()
    for asked, batch in shapes:
        sizes.add(asked, [torch.zeros(shape) for shape in batch])
    assert sizes.uneven == uneven
