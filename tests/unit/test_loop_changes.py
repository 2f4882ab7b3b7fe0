"""What the loop changes is found, and kept as it was when the step returned."""

from __future__ import annotations

import gc
import random
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy
import pytest
import torch
from torch import nn

from paceline.data.objects.entries import Entries
from paceline.data.objects.loop_changes import LoopChanges
from paceline.data.objects.values import ObjectValues, Owner
from paceline.step.replicas import digest_of, digests_of


class Phase(Enum):
    FIRST, SECOND = 1, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(2, 2), nn.Dropout(0.1)
        self.register_buffer("queue", torch.zeros(2))
        self.register_buffer("none", None)
        self.other = nn.Module()
        self.other.register_buffer("same", self.queue)
        self.last: Any = 0.0
        self.rate: float | None = None


def made(keeps: bool = True, **data: dict[Any, Any]) -> tuple[Net, torch.optim.Optimizer, LoopChanges]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    owners = {f"model.{name}" if name else "model": vars(module) for name, module in model.named_modules()}
    loop = LoopChanges(model, optimizer, digests_of, owners | data, keeps)
    loop.end_step(3)
    return model, optimizer, loop


def test_a_change_by_an_operation_is_found_and_kept_from_then_on() -> None:
    model, optimizer, loop = made()
    with torch.no_grad():
        model.layer.weight.mul_(2)
    loop.record_changes(begins=True)
    assert (list(loop.changed), loop.parameter) == (["parameter/layer.weight"], "layer.weight")
    loop.end_step(5)
    before = model.layer.weight.detach().clone()
    with torch.no_grad():
        model.layer.weight.mul_(2)
    optimizer.param_groups[0]["lr"] = 0.5
    assert torch.equal(loop.tensors()["parameter/layer.weight"], before)
    assert loop.state(6)["groups"][0]["lr"] == 0.1
    loop.now = True
    assert loop.tensors() == {} and loop.state(6)["groups"] == []


def test_a_change_through_data_is_found_where_digests_are_compared() -> None:
    model, _, loop = made()
    model.layer.weight.data.mul_(2)
    loop.record_changes(begins=True)
    assert not loop.changed
    loop.end_step(4)
    loop.record_changes()
    loop.refresh()  # as around a save that is due
    model.layer.weight.data.mul_(2)
    loop.record_changes(begins=True)
    assert list(loop.changed) == ["parameter/layer.weight"]


def test_what_the_session_changes_itself_is_not_found() -> None:
    model, _, loop = made()
    loop.end_step(4)
    loop.record_changes()
    model.layer.weight.data.mul_(2)
    with torch.no_grad():
        model.layer.bias.add_(1)
    model.last = 3
    loop.refresh()
    loop.record_changes(begins=True)
    assert not loop.changed


def test_plain_attributes_and_those_of_the_data() -> None:
    data = {"strength": 0.0, "values": torch.zeros(2)}
    model, _, loop = made(data=data)
    model.drop.p, model.rate, data["strength"] = 0.5, 0.7, 2.0
    loop.record_changes()
    assert list(loop.changed) == ["model.rate", "model.drop.p", "data.strength"]
    other, _, later = made(data={"strength": 0.0})
    later.load(loop.state(4))
    assert (other.drop.p, other.rate) == (0.1, None)  # as when the step returned
    loop.now = True
    later.load(loop.state(4))
    assert (other.drop.p, other.rate, later.state(4)["attributes"]["data"]) == (0.5, 0.7, {"strength": 2.0})


def test_what_changes_its_kind_or_size() -> None:
    model, _, loop = made()
    model.last = torch.zeros(3)
    loop.record_changes()
    loop.refresh()
    model.last = 1.0
    model.queue = torch.cat([model.queue, torch.ones(1)])
    loop.record_changes(begins=True)
    assert sorted(loop.changed) == ["buffer/queue", "model.last"]
    for size in (4, 5):
        loop.end_step(3)
        assert loop.tensors()["buffer/queue"].shape == (size - 1,)
        model.queue = torch.ones(size)
        loop.record_changes(begins=True)


def test_of_a_state_that_is_received_nothing_is_kept_of_before() -> None:
    model, _, loop = made()
    loop.load({"attributes": {}, "groups": [], "changed": ["parameter/layer.bias"]})
    before = model.layer.bias.detach().clone()
    with torch.no_grad():
        model.layer.bias.add_(1)
    assert torch.equal(loop.tensors()["parameter/layer.bias"], before)


def test_where_nothing_is_kept_the_state_is_that_of_now() -> None:
    model, optimizer, loop = made(keeps=False)
    with torch.no_grad():
        model.layer.bias.add_(1)
    loop.record_changes()
    loop.end_step(5)
    optimizer.param_groups[0]["lr"] = 0.5
    assert loop.tensors() == {} and loop.state(6)["groups"] == []


def test_small_values_of_other_kinds_are_kept_and_others_named() -> None:
    held: dict[str, Any] = {"tau": numpy.float64(0.1), "phase": Phase.FIRST, "pair": (1, 2)}
    held |= {"weights": torch.ones(3), "act": torch.relu}
    _, _, loop = made(loss=held)
    after = {"tau": numpy.float64(0.5), "phase": Phase.SECOND, "pair": (3, 4), "weights": torch.zeros(3)}
    held.update(after | {"act": torch.tanh})
    loop.record_changes(begins=True)
    loop.end_step(5)
    state = loop.state(6)
    assert state["lost"] == ["loss.act"] and state["attributes"]["loss"]["phase"] == "SECOND"
    joiner: dict[str, Any] = {"tau": numpy.float64(0.1), "phase": Phase.FIRST, "pair": (1, 2)}
    joiner |= {"weights": torch.ones(3), "act": torch.relu}
    _, _, other = made(loss=joiner)
    other.load(state)
    assert type(joiner["tau"]) is numpy.float64 and torch.equal(joiner.pop("weights"), torch.zeros(3))
    assert {**joiner, "act": 0} == {"tau": 0.5, "phase": Phase.SECOND, "pair": (3, 4), "act": 0}
    other.record_changes(begins=True)
    assert "The loop changed loss.act in a completed step" in other.not_restored() and other.not_restored() == ""
    assert other.needed == [], "steps without the script miss changes of the model and the data only"


def test_what_the_script_sets_again_is_not_named() -> None:
    held = {"act": torch.relu}
    _, _, loop = made(loss=held)
    held["act"] = torch.tanh
    loop.record_changes(begins=True)
    loop.end_step(5)
    again = {"act": torch.relu}
    _, _, other = made(loss=again)
    other.load(loop.state(6))
    again["act"] = torch.tanh
    other.record_changes(begins=True)
    assert other.not_restored() == ""


def held_tensors() -> dict[str, Any]:
    return {"weights": torch.ones(2000), "assigned": torch.ones(2000), "array": numpy.ones(2000), "same": torch.ones(9)}


def test_large_tensors_are_kept_as_they_were_when_the_step_returned() -> None:
    held = held_tensors()
    _, _, loop = made(sampler=held)
    held["weights"][0], held["assigned"], held["array"] = 0, held["assigned"] * 2, numpy.zeros(2000)
    loop.record_changes(begins=True)
    loop.end_step(5)
    held["weights"][1], held["array"][1] = 0, 3
    state = loop.state(6)
    assert state["lost"] == [] and loop.needed == ["sampler.weights", "sampler.assigned", "sampler.array"]
    joiner = held_tensors()
    before = dict(joiner)
    _, _, other = made(sampler=joiner)
    other.load(state)
    assert joiner["weights"] is before["weights"], "the script may hold it elsewhere, too"
    assert joiner["weights"][:3].tolist() == [0, 1, 1] and torch.equal(before["assigned"], torch.ones(2000))
    assert joiner["assigned"][0] == 2 and type(joiner["array"]) is numpy.ndarray and not joiner["array"].any()
    other.end_step(6)
    joiner["weights"][1] = 0
    assert other.state(7)["attributes"]["sampler"]["weights"][:3].tolist() == [0, 1, 1]
    loop.now = True
    assert loop.state(6)["attributes"]["sampler"]["weights"][:3].tolist() == [0, 0, 1]
    assert loop.state(6)["attributes"]["sampler"]["array"][1] == 3
    joiner["weights"] = torch.ones(3000)
    other.end_step(7)
    assert other.state(8)["attributes"]["sampler"]["weights"].shape == (3000,)
    assert "sampler.weights" not in other.state(8)["in_place"]


def test_a_small_tensor_changed_in_place_stays_the_same_object() -> None:
    held, joiner = {"weights": torch.ones(3)}, {"weights": torch.ones(3)}
    _, _, loop = made(sampler=held)
    held["weights"][0] = 0
    loop.record_changes(begins=True)
    loop.end_step(5)
    script = joiner["weights"]
    made(sampler=joiner)[2].load(loop.state(6))
    assert joiner["weights"] is script and script.tolist() == [0, 1, 1]


def with_gradients() -> tuple[Net, torch.optim.Optimizer, LoopChanges]:
    model, optimizer, loop = made()
    model.layer(torch.ones(1, 2)).sum().backward()
    loop.end_step(4)
    return model, optimizer, loop


def test_gradients_that_the_loop_clips_are_told_once() -> None:
    model, _, loop = with_gradients()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert "The loop changed the gradients after session.step of step 4" in loop.without_effect(5)
    loop.end_step(5)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert loop.without_effect(6) == ""


def test_a_backward_pass_of_the_loop_is_told() -> None:
    model, _, loop = with_gradients()
    model.layer(torch.ones(1, 2)).sum().backward()
    assert "or backward() does" in loop.without_effect(5)


def test_gradients_that_are_read_or_cleared_are_not() -> None:
    model, optimizer, loop = with_gradients()
    assert nn.utils.get_total_norm([value.grad for value in model.parameters()]) > 0  # type: ignore[misc]
    assert loop.without_effect(5) == ""
    loop.end_step(5)
    optimizer.zero_grad(set_to_none=False)
    assert loop.without_effect(6) == ""
    loop.end_step(6)
    optimizer.zero_grad()
    model.layer(torch.ones(1, 2)).sum().backward()  # gradients of its own, as for a penalty
    assert loop.without_effect(7) == ""
    loop.end_step(7)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # only the first three steps are looked at
    assert loop.without_effect(8) == ""


def test_a_large_tensor_from_inference_mode_is_held() -> None:
    """torch counts no changes of such a tensor."""
    with torch.inference_mode():
        features = torch.zeros(4096)
    model, _, loop = made(data={"features": features})
    model.last = features
    loop.record_changes(begins=True)
    assert list(loop.changed) == ["model.last"]


def test_values_that_the_loop_has_set_and_not_set_back() -> None:
    model, _, loop = made()
    assert loop.set_apart() == ()
    model.rate, model.last, model.drop.p = 0.5, torch.zeros(2), 0.2
    loop.record_changes(begins=True)
    assert loop.set_apart() == ("model.drop.p = 0.2", "model.rate = 0.5")
    loop.end_step(4)
    model.rate, model.drop.p = None, 0.3
    loop.record_changes(begins=True)
    assert loop.set_apart() == ("model.drop.p = 0.3",)


def test_a_worker_that_has_loaded_what_others_set_is_not_apart() -> None:
    model, _, loop = made()
    model.rate = 0.5
    loop.record_changes(begins=True)
    loop.end_step(4)
    other, _, joined = made()
    joined.load(loop.state(5))
    assert other.rate == 0.5 and joined.set_apart() == loop.set_apart() == ("model.rate = 0.5",)


def _move(model: Any) -> None:
    model.other.last = model.__dict__.pop("last")


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an attribute": (lambda model: setattr(model.drop, "p", 0.5), "model.drop.p"),
    "an entry that takes the place of another": (_move, "model.other.last"),
    "a layer": (lambda model: setattr(model, "layer", nn.Linear(2, 2)), "model._modules"),
    "a hook": (lambda model: model.drop.register_forward_hook(lambda *_: None), "model.drop._forward_hooks"),
    "a key of a dictionary": (lambda model: model.many.update(more=1), "model.many"),
    "a renamed key": (lambda model: model.many.update(more=model.many.pop(0)), "model.many"),
    "another dictionary": (lambda model: setattr(model, "many", {}), "model.many"),
    "an item of a list": (lambda model: model.items.append(1), "model.items"),
    "a small tensor, without a new version": (lambda model: model.small.data.add_(1), "model.small"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changes_are_found_though_all_values_are_compared_together(kind: str) -> None:
    change, name = CHANGES[kind]
    net, _, loop = made()
    model: Any = net
    model.many, model.items, model.small = dict.fromkeys(range(300)), [0], torch.zeros(2)
    loop.refresh()
    before = loop._plain
    loop.record_changes()
    assert not loop.changed and loop._plain is before  # nothing was read again
    change(model)
    loop.record_changes()
    assert name in loop.changed
    loop.changed.clear()
    loop.record_changes()
    assert not loop.changed


def test_only_the_object_that_changes_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    values = Owner.values

    def counted(owner: Owner) -> dict[Any, Any]:
        read.append(owner.name)
        return values(owner)

    monkeypatch.setattr(Owner, "values", counted)
    model, _, loop = made()
    model.other.history = history = {}  # type: ignore[assignment]
    loop.end_step(3)

    def read_by(look: Callable[[], None]) -> list[str]:
        read.clear()
        look()
        return read.copy()

    for step in range(4):
        model.last = step * 0.5 + 1
        assert read_by(lambda: loop.record_changes(begins=True)) == ["model"]
        assert read_by(lambda: loop.end_step(5)) == []
    for step in range(4):
        history[step] = 0.5
        found = read_by(lambda: loop.record_changes(begins=True))
        assert found == ["model.other"] if step else len(found) == 4
    model.drop.p = 0.5
    assert sorted(read_by(loop.record_changes)) == ["model.drop", "model.other"]


def test_values_of_other_kinds_are_compared_from_then_on() -> None:
    model, _, loop = made()
    changes: list[tuple[Any, Callable[[Any], Any]]] = [([1], lambda one: one.append(1)), ({1: 1}, dict.popitem)]
    for new, change in changes:
        model.last = new
        loop.record_changes()
        assert list(loop.changed) == ["model.last"]
        loop.changed.clear()
        change(new)
        loop.record_changes()
        assert list(loop.changed) == ["model.last"]


def test_a_replaced_dictionary_is_released() -> None:
    class Cache(dict[int, int]):
        pass

    model, _, loop = made()
    model.last = Cache({1: 1})
    loop.end_step(3)
    for _ in range(4):
        held = ref(model.last)
        model.last = Cache({1: 1})
        loop.record_changes(begins=True)
        loop.end_step(3)
        gc.collect()
        assert held() is None


class Slots:
    __slots__ = ("first", "second")
    first: Any
    second: Any


def test_entries_that_appear_are_found() -> None:
    slots = Slots()
    owners = ObjectValues([Owner("", Entries(slots, ["first", "second"]))])
    slots.first = 1
    assert owners.values() == [{"first": 1}]
    slots.second = 2
    assert owners.values() == [{"first": 1, "second": 2}]


def test_values_that_are_compared_together_are_those_of_each_object() -> None:
    chance = random.Random(0)
    slots, objects = Slots(), [SimpleNamespace(kept=0.5, table={}) for _ in range(5)]
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2))
    mappings: list[Any] = [*map(vars, (*objects, model, *model)), Entries(slots, ["first", "second"]), OrderedDict(a=1)]
    new: list[Callable[[], Any]] = [
        lambda: chance.randrange(3),
        lambda: bool(chance.randrange(2)),
        lambda: "text",
        lambda: [1],
        lambda: {chance.randrange(3): 1},
        dict,
        lambda: (1, [2]),
        lambda: torch.zeros(2),
        lambda: torch.zeros(2000),
        lambda: numpy.ones(3),
        object,
    ]

    def change() -> None:
        entries: Any = chance.choice(mappings)
        key = chance.choice(list(entries) if isinstance(entries, Entries) else ["kept", "table", "more", "training"])
        value = entries.get(key)
        kind = chance.randrange(4)
        if kind == 0 and isinstance(entries, dict):
            entries.pop(key, None)
        elif kind == 1 and isinstance(value, dict):
            value[chance.randrange(400)] = 1
        elif kind == 1 and isinstance(value, list):
            value.append(1)
        elif kind == 1 and isinstance(value, torch.Tensor):
            value.add_(1)
        elif kind == 2:
            model.add_module(str(chance.randrange(4)), nn.Dropout(chance.random()))
        else:
            entries[key] = chance.choice(new)()

    slots.first = 1
    for number in range(1500):
        if number % 15 == 0:
            each = [Owner("", entries) for entries in mappings]
            owners = ObjectValues([Owner("", entries) for entries in mappings])
        for _ in range(chance.randrange(3)):
            change()
        now = owners.values()
        assert now == [owner.values() for owner in each]
        assert owners.values() is now


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(7),
        torch.randn(0),
        torch.randn(100)[3:],
        torch.randn(6, 4).t(),
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.arange(13, dtype=torch.uint8)[1:],
    ],
    ids=lambda value: f"{value.dtype}-{tuple(value.shape)}",
)
def test_a_digest_is_the_sum_of_words(value: torch.Tensor) -> None:
    data = value.resolve_conj().contiguous().numpy().tobytes()
    words = (int.from_bytes(data[place : place + 8], "little") for place in range(0, len(data), 8))
    assert digest_of(value) == sum(words) % 2**64
