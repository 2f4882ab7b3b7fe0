"""What the loop changes is found, and kept as it was when the step returned."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy
import torch
from torch import nn

from paceline.data.objects.loop_changes import LoopChanges
from paceline.step.replicas import digests_of


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
    assert "The loop changed loss.act in a step that is done" in other.not_restored() and other.not_restored() == ""
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
