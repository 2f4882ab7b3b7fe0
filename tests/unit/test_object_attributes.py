"""What the attributes of objects hold: seen whatever holds it, compared, and put back in place."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from fractions import Fraction
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from paceline.data.objects import attributes
from paceline.data.objects.attributes import Attributes, same
from paceline.data.objects.values import PlainValues

GENERATOR = random.Random(5)
QUEUE = deque([torch.zeros(2)], maxlen=2)


class Model(nn.Module):
    """Keeps values in all kinds of places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.count, self.rate, self.name = 1, 0.5, "a"
        self.kept = torch.zeros(3)
        self.history: list[Any] = [1, torch.ones(2)]
        self.table: dict[str, Any] = {"first": [2.0], "random": random.Random(1)}
        self.recent: deque[torch.Tensor] = deque([torch.ones(2), torch.zeros(2)], maxlen=2)
        self.chosen = {3, 4}
        self.array = numpy.zeros(4)
        self.randoms = [torch.Generator().manual_seed(2), numpy.random.default_rng(3), numpy.random.RandomState(4)]
        number = 7

        def closed() -> int:
            nonlocal number
            number += 1
            return number

        self.closed = closed
        self.bound = self.layer.forward
        self.partly = partial(max, [6], default=8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        GENERATOR.random()
        return self.layer(values + sum(QUEUE))


def changes(model: Model) -> dict[str, Callable[[], Any]]:
    return {
        "model.count": lambda: setattr(model, "count", 2),
        "model.rate": lambda: setattr(model, "rate", float("nan")),
        "model.kept": lambda: model.kept.add_(1),
        "model.history[1]": lambda: model.history[1].mul_(2),
        "model.history": lambda: model.history.append(9),
        "model.recent": lambda: model.recent.append(torch.ones(2)),
        "QUEUE": lambda: QUEUE.append(torch.ones(2)),
        "model.table": lambda: model.table.update(more=1),
        "model.table['first'][0]": lambda: model.table.update(first=[3.0]),
        "model.table['random']": lambda: model.table["random"].random(),
        "model.chosen": lambda: model.chosen.add(5),
        "model.array": lambda: model.array.fill(1),
        "model.randoms[0]": lambda: torch.rand(1, generator=model.randoms[0]),
        "model.randoms[1]": lambda: model.randoms[1].random(),
        "model.randoms[2]": lambda: model.randoms[2].rand(),
        "number": model.closed,
        "model.new": lambda: setattr(model, "new", 3),
        "model.partly arguments": lambda: model.partly.args[0].append(7),
        "GENERATOR": lambda: GENERATOR.random(),
    }


def state_of(model: Model) -> dict[str, Any]:
    held = Attributes({"model": model}, set())
    return dict(held.values) | {"entries": sorted(model.__dict__), "history": len(model.history), "cell": cell(model)}


def cell(model: Model) -> int:
    content: int = model.closed.__closure__[0].cell_contents  # type: ignore[index]
    return content


@pytest.mark.parametrize("name", changes(Model()))
def test_a_change_is_seen_and_put_back(name: str) -> None:
    model = Model()
    before, held = state_of(model), Attributes({"model": model}, set())
    history, table, kept = model.history, model.table, model.kept
    changes(model)[name]()
    assert not same(state_of(model), before)
    held.put_back()
    assert same(state_of(model), before), name
    assert model.history is history and model.table is table and model.kept is kept


def test_parameters_and_what_others_keep_are_left_alone() -> None:
    model = Model()
    names = set(Attributes({"model": model}, set()).values)
    assert not any("weight" in name or "bias" in name for name in names)
    assert "model.name" in names and "model.training" not in names
    assert "model.kept" not in Attributes({"model": model}, {id(model.kept)}).values
    without = Attributes({"model": model}, set(), copies=False)
    assert "model.kept" not in without.values and "model.count" in without.values


def test_generators_are_named() -> None:
    model = Model()
    found = dict(Attributes({"model": model}, set()).generators())
    assert set(found) == {"model.table['random']", *(f"model.randoms[{place}]" for place in range(3)), "GENERATOR"}
    assert same(found["GENERATOR"], GENERATOR.getstate())


def test_large_objects_are_seen_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "_MOST_BYTES", 32)
    monkeypatch.setattr(attributes, "_MOST_ENTRIES", 2)
    held = Attributes({"a": [torch.zeros(4), torch.zeros(4)], "b": [1, 2, 3], "c": dict.fromkeys(range(3), 1)}, set())
    assert set(held.values) == {"a[0]", "a[1]", "b[0]", "b[1]"}
    assert set(Attributes({"a": [torch.zeros(4), torch.zeros(5)]}, set()).values) in ({"a[0]"}, {"a[1]"})
    monkeypatch.setattr(attributes, "_MOST_OBJECTS", 5)
    assert len(Attributes({"a": [[[[[[1]]]]]]}, set()).values) == 0


VALUES: list[Any] = [
    torch.zeros(2), torch.ones(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64),
    numpy.zeros(2), numpy.ones(2), numpy.zeros((2, 1)), 0, 1, 0.0, 1.5, float("nan"), True, False, "a", "b", b"a",
    [1, 2], [1, 3], [1], (1, 2), {"a": 1}, {"b": 1}, {"a": 2}, {"a": 1, "b": 1}, None, torch.full((2,), float("nan")),
]  # fmt: skip


def test_only_like_values_are_the_same() -> None:
    for left, one in enumerate(VALUES):
        for right, other in enumerate(VALUES):
            assert same(one, other) == (left == right), (one, other)
    assert same(object(), object()), "nobody can tell"
    assert not same(torch.zeros(2), torch.zeros(2).to_sparse())
    assert not same([torch.zeros(1)], [torch.ones(1)]) and not same({"a": [1]}, {"a": [2]})


def test_an_empty_cell_is_left_empty() -> None:
    def outer() -> Callable[[], Any]:
        def inner() -> Any:
            return later

        if not inner:
            later = 1
        return inner

    function = outer()
    Attributes({"f": function}, set()).put_back()
    with pytest.raises(NameError):
        function()


PASSES = ContextVar("PASSES", default=0)
LOCAL = threading.local()


class Doubled(torch.autograd.Function):
    passes = 0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.part, self.text = numpy.int64(0), Fraction(0), ""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.steps, self.part, self.text = self.steps + 1, self.part + Fraction(1, 3), self.text + "."
        PASSES.set(PASSES.get() + 1)
        LOCAL.passes = getattr(LOCAL, "passes", 0) + 1
        Doubled.passes += 1
        return values


class Centered(nn.Module):
    """A loss with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))


def test_counters_of_all_kinds_are_seen_and_put_back() -> None:
    model = Counting()
    LOCAL.passes = 0
    before = Attributes({"model": model}, set())
    model(torch.ones(1))
    after = Attributes({"model": model}, set())
    changed = {name for name, value in after.values.items() if not same(before.values.get(name), value)}
    assert changed == {"model.steps", "model.part", "model.text", "PASSES", "LOCAL.passes", "Doubled.passes"}
    before.put_back()
    assert (model.steps, model.part, model.text) == (0, 0, "")
    assert (PASSES.get(), LOCAL.passes, Doubled.passes) == (0, 0, 0)


def test_buffers_of_a_loss_are_seen_and_those_of_the_model_are_not() -> None:
    found = Attributes({"model": nn.BatchNorm1d(2), "loss": Centered()}, set()).values
    assert "loss.center" in found and not any(name.startswith("model.running") for name in found)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize(
    "convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, lambda value: value.to("meta")]
)
def test_tensors_without_plain_memory_are_left_alone(convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = nn.Module()
    model.adjacency, model.scale = convert(torch.eye(3)), 2.0
    before = Attributes({"model": model}, set())
    assert before.values == {"model.scale": 2.0}
    before.put_back()
    plain = PlainValues(model=model)
    now = plain.now()
    assert {key: value for values in now for key, value in values.items() if key == "scale"} == {"scale": 2.0}
    assert not any("adjacency" in values for values in now)
    with plain.set_to(now):
        assert model.scale == 2.0


class WithDefaults:
    """Has a default in its class, which an assignment to the object hides."""

    strength = 0.0
    shift = numpy.zeros(2)


def test_attribute_that_hides_a_default_of_its_class_is_taken_back() -> None:
    data = WithDefaults()
    plain = PlainValues(data=data)
    before = plain.now()
    data.strength += 0.5
    data.shift = data.shift + 1
    data.cache = 3  # type: ignore[attr-defined]
    with plain.set_to(before):
        assert data.strength == 0.0
        assert data.shift.tolist() == [0.0, 0.0]
        assert data.cache == 3  # type: ignore[attr-defined]
    assert vars(data).keys() == {"strength", "shift", "cache"}
    assert data.strength == 0.5
    later = plain.now()
    data.strength = 1.0
    with plain.set_to(later):
        assert data.strength == 0.5


class Optional:
    """Has a default in its class that each object hides from the start."""

    limit: int | None = 10

    def __init__(self, limit: int | None) -> None:
        self.limit = limit


@pytest.mark.parametrize(("first", "later"), [(None, None), (None, 3), (5, None), (5, 3)])
def test_attribute_that_hid_the_default_before_is_set_back_to_its_value(first: int | None, later: int | None) -> None:
    data = Optional(first)
    plain = PlainValues(data=data)
    before = plain.now()
    data.limit = later
    with plain.set_to(before):
        assert data.limit == first
    assert data.limit == later


def test_what_was_removed_stays_removed() -> None:
    data = Optional(5)
    plain = PlainValues(data=data)
    before = plain.now()
    del data.limit
    with plain.set_to(before):
        assert data.limit == 10
    assert not vars(data)
