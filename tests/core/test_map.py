"""A function of items on all workers: the same results on any number of them, and errors that all of them raise."""

from collections.abc import Callable
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import random
from functools import partial
import numpy
import torch
import paceline
from paceline.evaluation import gathering
from subjects import classes, tell

gathering._PARCEL_BYTES = 200  # several messages
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 4))
session = paceline.start(
    model=model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.cross_entropy, data=classes(32),
    batch=16, exact=True, timeout_seconds=60,
)

def raised(call):
    try:
        call()
    except Exception as error:
        return " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])

computed = []

def play(item):
    computed.append(item)
    draws = torch.rand(3), random.random(), numpy.random.rand()
    layers = (model.training, torch.is_grad_enabled())
    return {"item": item, "draws": draws, "output": model(torch.randn(5, 12)).t(), "layers": layers, "none": None}

def bits(value):
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), list(value.stride()), value.tolist()]
    if isinstance(value, dict):
        return {str(key): bits(one) for key, one in value.items()}
    return [type(value).__name__, *map(bits, value)] if isinstance(value, list | tuple) else value

def stop(item):
    if item == "b":
        raise LookupError("no such pole")
    return item

def change(item):
    with torch.no_grad():
        model[0].weight.add_(0)

found, shares = [], []
for epoch in session.epochs(2):
    for items in (range(7), ["a", "b"], []):
        computed.clear()
        results = session.map(play, items)
        shares.append([*computed])
        found.append(bits(results))
        for one in results:
            one["output"].zero_()  # not what a joiner or a resumed run gets
    found.append(torch.rand(()).item())
    for batch in session.batches():
        session.step(batch)
found.append(bits(session.map(play, range(2))))
wrong = [
    raised(call) for call in (
        lambda: session.map(stop, ["a", "b", "c"]),
        lambda: session.map(lambda item: object(), [1, 2]),
        lambda: session.map(lambda item: numpy.zeros(2), [1]),
        lambda: session.map(3, [1]),
        lambda: session.map(play, 3),
        lambda: session.map(change, [1, 2]),
        lambda: session.map(play, [session.rank]),
        lambda: session.map(play, range(3 + session.rank)),
        lambda: session.map(lambda item: session.map(play, [item]), range(session.workers)),
        lambda: session.map(lambda item: session.save(), range(session.workers)),
    )
]
kept = session._loop.progress.results_of["map"]
now = kept[(2, 1, 0)]
tell(
    found=found, wrong=wrong, fingerprint=session.fingerprint(), shares=shares,
    kept=[[call, [one and list(map(type, one)).count(dict) for one in kept[call]]] for call in kept if call[1] >= 0],
    zeros=[one["output"].eq(0).all().item() for results in now for one in results],
)
"""


@pytest.fixture(scope="module")
def everyone(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return {workers: printed(SCRIPT, workers, tmp_path_factory.mktemp("map")) for workers in (1, 3)}


def test_the_results_are_those_of_one_process(everyone: dict[int, list[dict[str, Any]]]) -> None:
    (alone,) = everyone[1]
    for one in everyone[3]:
        assert one["found"] == alone["found"] and one["fingerprint"] == alone["fingerprint"]
    first, again = alone["found"][0], alone["found"][4]
    assert [one["item"] for one in first[1:]] == list(range(7))
    assert all(one["layers"] == ["tuple", False, False] for one in first[1:])
    draws = [str(one["draws"]) for result in (first, again, alone["found"][1]) for one in result[1:]]
    assert len(draws) == len(set(draws)) == 16, "each item of each call has its own random numbers"


def test_each_item_is_computed_once(everyone: dict[int, list[dict[str, Any]]]) -> None:
    shares = [one["shares"][0] for one in everyone[3]]
    assert sorted(item for share in shares for item in share) == list(range(7))
    assert max(map(len, shares)) == 3


def test_what_is_kept(everyone: dict[int, list[dict[str, Any]]]) -> None:
    """The results of the current epoch, which is that of the last step, and not as the script has changed them."""
    for one in [*everyone[1], *everyone[3]]:
        assert one["kept"] == [[[0, 0, 0], [None] * 3], [[2, 1, 0], [7, 2, []]]]
        assert not any(one["zeros"])


def test_errors_are_those_of_all_workers(everyone: dict[int, list[dict[str, Any]]]) -> None:
    item = "LookupError: no such pole This was item 1 of session.map: 'b'."
    values = [one["wrong"] for one in everyone[3]]
    assert [one[0] for one in values] == [
        f"InputError: session.map failed on rank 1: {item}", item, f"InputError: session.map failed on rank 1: {item}"
    ]  # fmt: skip
    for one, wrong in enumerate([*values, *(one["wrong"] for one in everyone[1])]):
        assert "the result of the function for item" in wrong[1] and "cannot be sent" in wrong[1], one
        assert "(1) cannot be sent" in wrong[2] and "torch.as_tensor" in wrong[2]
        assert wrong[3].startswith("InputError: session.map takes a function and items, but it got an int and a list")
        assert "but it got a function and an int" in wrong[4]
    for wrong in values:
        assert "changes the parameter '0.weight' in place" in wrong[5] and "of session.map" in wrong[5]
        assert wrong[6].startswith("DisagreementError: map: The workers do not agree on items: rank 0: 1 (")
        assert "rank 0: 3 (" in wrong[7] and "rank 2: 5 (" in wrong[7]
        assert "Give session.map the same items" in wrong[7]
    for wrong in [*values, *(one["wrong"] for one in everyone[1])]:
        assert "session.map was called by a function that session.map runs. All workers must" in wrong[8]
        assert "session.save was called by a function that session.map runs." in wrong[9]
