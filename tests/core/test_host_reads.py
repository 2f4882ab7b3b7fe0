"""How often a step makes the host wait for the device: once, whatever the number of workers and microbatches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import os
from contextlib import nullcontext
from functools import partial
import torch
import paceline
from subjects import classes, tell

given = eval(os.environ["GIVEN"])
if given.pop("accelerator"):
    import accelerator
    from accelerator import Counting
    accelerator.install()
elif given.pop("strict", False):

    class Counting:
        def __enter__(self):
            torch.cuda.set_sync_debug_mode("error" if session.position >= 3 else "default")

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")
else:
    Counting = nullcontext
grouped = given.pop("group", False)
if grouped:  # of one rank, by the strategy for several
    from dataclasses import replace
    from paceline.strategies import registry
    from paceline.strategies.data_parallel.allreduce import AllReduce

    back_end = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(back_end, store=store, rank=0, world_size=1)
    registry.register("allreduce", replace(registry.entry_of("allreduce"), alone=AllReduce))

dtype = given.pop("dtype")
counted = given.pop("counted")
optional = given.pop("optional")
named = given.pop("named")
broken = given.pop("broken")
there = given.pop("there")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(12, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.last = torch.nn.Linear(16, 4)
        self.sometimes = torch.nn.Linear(12, 4)

    def forward(self, values):
        out = self.last(torch.tanh(self.norm(self.first(values))))
        return out + self.sometimes(values) if optional and torch.rand(()) < 0.5 else out

def loss(output, target):
    if named:
        hit = output.argmax(1) == target
        found = {"accuracy": hit.double().mean(), "recall": ((hit & (target == 1)).sum(), (target == 1).sum())}
        return torch.nn.functional.cross_entropy(output, target), found
    if counted:
        sums = torch.nn.functional.cross_entropy(output.float(), target, reduction="sum")
        return sums * counted, (target >= 0).sum() * counted
    return torch.nn.functional.cross_entropy(output, target)

data = classes(96, dtype=dtype)
data.tensors[0][list(broken)] = torch.nan
if there and Counting is not nullcontext:
    device = "cuda" if torch.cuda.is_available() else accelerator.DEVICE
    data.tensors = tuple(tensor.to(device) for tensor in data.tensors)
net = Net().to(dtype)
session = paceline.start(
    model=net,
    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9) if dtype != torch.float64 else torch.optim.AdamW,
    loss=loss,
    data=data,
    batch=16,
    audit="off",
    **given,
)
assert not grouped or type(session._loop.strategy) is AllReduce
waits, applied = [], []
batches = session.batches(steps=9)
for _ in range(9):
    with Counting() as counting:
        report = session.step(next(batches))
    applied.append(report.applied)
    if counting is not None:
        waits.append([counting.reads, counting.uploads])
values = [value.cpu().double().sum().item() for value in net.state_dict().values()]
tell(metrics=report.metrics, loss=report.loss, norm=report.gradient_norm, applied=applied, values=values, waits=waits)
"""

STEADY = 3
"""The first steps find out what the model does."""


def spelled(**given: Any) -> str:
    given = {"dtype": "float64", "counted": 0, "optional": False, "named": False, "broken": (), "there": False} | given
    return (
        repr(given)
        .replace("'float32'", "torch.float32")
        .replace("'float64'", "torch.float64")
        .replace("'float16'", "torch.float16")
    )


def train(printed: Printed, directory: Path, workers: int, **given: Any) -> dict[str, Any]:
    """What rank 0 told, with the waits of all workers in the steady state; all must have come to the same."""
    directory.mkdir()
    environment = {"GIVEN": spelled(**given)} | ({} if "strict" in given else {"CUDA_VISIBLE_DEVICES": ""})
    everyone = printed(SCRIPT, workers, directory, environment=environment)
    assert len({repr((one["loss"], one["norm"], one["values"])) for one in everyone}) == 1
    return everyone[0] | {"waits": [step for one in everyone for step in one["waits"][STEADY:]]}


@pytest.mark.sampled(1, turns=9)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "given",
    [
        {"microbatches": 1, "there": True},
        {"microbatches": 4, "clip_norm": 0.5, "counted": 1, "dtype": "float32"},
        {"microbatches": 4, "counted": 10_000, "dtype": "float16", "exact": True},
        {"microbatches": 8, "exact": True, "clip_norm": 0.5},
        {"microbatches": 8, "exact": True, "named": True},
        {"microbatches": 8, "optional": True, "missing_gradient": "zero"},
        {"microbatches": 8, "broken": (17, 61), "nonfinite": "skip", "clip_norm": 0.5},
    ],
    ids=[
        "one microbatch, data on the device",
        "clipped",
        "counted, float16",
        "exact",
        "metrics",
        "missing gradients",
        "not finite",
    ],
)
def test_a_step_reads_once_from_the_device(
    printed: Printed, tmp_path: Path, given: dict[str, Any], workers: int
) -> None:
    if given["microbatches"] < workers:
        given = given | {"microbatches": workers}
    found = train(printed, tmp_path / "device", workers, accelerator=True, **given)
    for reads, uploads in found["waits"]:
        assert len(reads) <= 1, "\n".join(reads)
        assert not uploads, "\n".join(uploads)
    host = train(printed, tmp_path / "host", workers, accelerator=False, **given)
    for one in ("loss", "norm", "values", "metrics"):
        assert found[one] == pytest.approx(host[one], rel=1e-5, nan_ok=True)
    assert list(found["metrics"]) == (["accuracy", "recall"] if given.get("named") else [])
    assert found["applied"] == host["applied"]
    assert all(found["applied"]) == ("broken" not in given)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("given", "workers"),
    [
        ({"strategy": "stealing", "exact": True}, 2),
        ({"strategy": "backup"}, 2),
        ({"strategy": "auto"}, 2),
        ({"reduction": "collective", "clip_norm": 0.5}, 2),
        ({"reduction": "collective", "group": True}, 1),
    ],
    ids=["stealing", "backup workers", "auto", "collective", "a group of one"],
)
def test_other_strategies_read_once_too(printed: Printed, tmp_path: Path, given: dict[str, Any], workers: int) -> None:
    found = train(printed, tmp_path / "device", workers, accelerator=True, microbatches=8, **given)
    for reads, uploads in found["waits"]:
        assert len(reads) == 1, "\n".join(reads)
        assert not uploads, "\n".join(uploads)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    "given",
    [{}, {"exact": True}, {"group": True, "reduction": "collective"}, {"group": True, "exact": True}],
    ids=["alone", "alone, exact", "NCCL, collective", "NCCL, exact"],
)
def test_no_step_on_a_gpu_makes_the_host_wait_unasked(
    printed: Printed, tmp_path: Path, given: dict[str, Any], there: bool
) -> None:
    """torch raises at an operation that waits; that for the one copy, an event, is the only one asked for."""
    found = train(
        printed, tmp_path / "d", 1, accelerator=False, strict=True, there=there, microbatches=8, clip_norm=0.5, **given
    )
    assert all(found["applied"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("given", "text", "code"),
    [
        ({"broken": (17,)}, "NonFiniteLoss: The loss is nan at step ", 1),
        ({"optional": True, "exact": True}, "InputError: The parameter 'sometimes.weight' got no gradient from ", 2),
    ],
    ids=["not finite", "missing gradient"],
)
def test_a_bad_step_is_refused_before_the_update(
    ranks: Any, tmp_path: Path, given: dict[str, Any], text: str, code: int, workers: int
) -> None:
    environment = {"GIVEN": spelled(accelerator=True, microbatches=8, **given), "CUDA_VISIBLE_DEVICES": ""}
    for one in ranks(SCRIPT, workers, tmp_path, environment=environment):
        assert one.code == code
        assert text in one.err
