"""The state beside the tensors, as JSON."""

import json
from collections import Counter, OrderedDict, deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # an optimizer imports it, and it sets a variable of the environment
from torch.optim import lr_scheduler, swa_utils

from paceline.checkpoint.encoding import EncodingError, decode, encode


def through_json(value: Any, now: Any = None) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, tensors, "it"))), tensors, now, "it")


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            3,
            2**70,
            0.1,
            -0.0,
            float("inf"),
            "text \ud800",
            [1, [2]],
            (1, (2.5, None)),
            {},
            {"a": {"b": ()}},
        ),
        *({1: "a", "1": "b"}, {"$tensor": "no tensor"}, {(1, 2): [3]}, {3, 1}, frozenset("ab"), deque([1])),
        *(Counter({2: 1}), OrderedDict(b=1, a=2), torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")),
        *(np.float32(0.1), np.int64(3), np.bool_(True)),
    ],
)
def test_the_same_value_again(value: Any) -> None:
    again = through_json(value)
    assert again == value and type(again) is type(value) and repr(again) == repr(value)


def test_a_tensor_in_two_places_is_one() -> None:
    shared = torch.arange(3)
    again = through_json({"a": shared, "b": [shared, torch.tensor(2.0)]})
    assert again["a"] is again["b"][0] and again["a"].tolist() == [0, 1, 2] and again["b"][1] == 2.0


def test_functions_are_those_of_the_script() -> None:
    value = {"f": [len, json.dumps], "kind": Counter}
    assert through_json(value, value) == value
    with pytest.raises(EncodingError, match=r"it/f/1 was 'json.dumps' and is now 'json.loads'"):
        through_json(value, {"f": [len, json.loads], "kind": Counter})
    with pytest.raises(EncodingError, match=r"it/kind was 'collections.Counter' and is now None"):
        through_json(value, {"f": [len, json.dumps]})


@pytest.mark.parametrize("value", [object(), partial(len), b"bytes", {"a": [1, 2j]}])
def test_what_cannot_be_written_is_named(value: Any) -> None:
    with pytest.raises(EncodingError, match=r"it.* is a "):
        encode(value, {}, "it")


@pytest.mark.parametrize(
    "text",
    [
        *(
            '{"$tensor": "other"}',
            '{"$tensor": []}',
            '{"$code": "os.system"}',
            '{"$number": ["object", 1]}',
            '{"$x": 1}',
        ),
        *('{"$number": ["int8", 1e300]}', '{"$number": 3}', '{"$dict": [[[], 1]]}', '{"$dict": 3}', '{"$size": ["a"]}'),
        *('{"$device": "nowhere"}', '{"$dtype": "torch.load"}', '{"$dtype": 3}', '{"$set": [[]]}'),
    ],
)
def test_what_was_not_written_is_refused(text: str) -> None:
    with pytest.raises(EncodingError):
        decode(json.loads(text), {}, None, "it")


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize(
    "make",
    [
        partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step),
        partial(lr_scheduler.MultiStepLR, milestones=[2, 4]),
        partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=9),
        partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=1.0, cycle_momentum=False),
        partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
        partial(swa_utils.SWALR, swa_lr=0.5, anneal_epochs=3),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
        ),
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        ),
    ],
    ids=["lambda", "multi", "one cycle", "cyclic", "restarts", "swa", "sequential", "chained"],
)
def test_schedules_of_torch(make: Any, lr: Any) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        given = lr.clone() if isinstance(lr, torch.Tensor) else lr
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=given)
        return optimizer, make(optimizer)

    optimizer, schedule = made()
    for _ in range(3):
        optimizer.step()
        schedule.step()
    state = through_json(schedule.state_dict(), schedule.state_dict())
    groups = through_json(
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    )
    other, resumed = made()
    other.step()
    other.param_groups[0].update(groups[0])
    resumed.load_state_dict(state)
    for _ in range(4):
        optimizer.step(), other.step()
        schedule.step(), resumed.step()
        assert float(optimizer.param_groups[0]["lr"]) == float(other.param_groups[0]["lr"])
