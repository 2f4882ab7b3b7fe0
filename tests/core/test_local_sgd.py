"""Workers that train by themselves and average now and then: whose samples count how much, and when they wait."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]
WAYS = pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])

HEAD = """
import json, os, time
from functools import partial
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional
import paceline
from paceline.data.order import Order
from paceline.schedule.shares import even
from subjects import CASES, Sentences, images, mlp, numbers, per_token, tell, transformer

sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

def start(strategy="local-sgd", every=3, after=0, **more):
    given = {"model": mlp(6, 1, torch.float64), "optimizer": sgd, "data": numbers(100), "batch": 48}
    if "forward" not in more:
        given["loss"] = functional.mse_loss
    return paceline.start(**given | {"strategy": strategy, "local": {"every": every, "after": after}} | more)

def values(session):
    return torch.cat([value.detach().flatten() for value in session._context.compute.model.parameters()]).tolist()

def train(session, steps):
    losses = [session.step(batch).loss for batch in session.batches(steps=steps)]
    return {"losses": losses, "values": values(session), "fingerprint": session.fingerprint()}
"""


def check_equal(everyone: list[dict[str, Any]], found: str, wanted: str, losses: bool = True) -> None:
    assert len({one[found]["fingerprint"] for one in everyone}) == 1
    for one in everyone:
        assert one[found]["values"] == pytest.approx(one[wanted]["values"], rel=1e-9, abs=1e-13)
        if losses:
            assert one[found]["losses"] == pytest.approx(one[wanted]["losses"], rel=1e-9, abs=0)


# 8 microbatches are shares of 3, 3 and 2; the last batch of an epoch has 4 samples, in one microbatch
EACH_STEP = """
tokens = {"model": transformer(0.0).double(), "data": Sentences(90), "batch": 32, "forward": per_token}
short = {"data": numbers(4), "optimizer": torch.optim.AdamW}
tell(
    average=train(start(every=1), 6), plain=train(start("allreduce"), 6),
    average_tokens=train(start(every=1, **tokens), 5),
    plain_tokens=train(start("allreduce", **tokens | {"model": transformer(0.0).double()}), 5),
    average_idle=train(start(every=1, **short), 3), plain_idle=train(start("allreduce", **short), 3),
)
"""


@pytest.mark.sampled(1)
@WAYS
def test_an_average_after_each_step_is_all_reduce(printed: Printed, tmp_path: Path, one_machine: bool) -> None:
    """Up to rounding, whatever the shares; also where all but one worker have nothing to do and no optimizer state."""
    everyone = printed(HEAD + EACH_STEP, 3, tmp_path, one_machine=one_machine)
    check_equal(everyone, "average", "plain")
    check_equal(everyone, "average_tokens", "plain_tokens")
    check_equal(everyone, "average_idle", "plain_idle")


BY_HAND = """
def pipedream_reference(workers, every, steps):
    data, order = numbers(100), Order(100, 48, 8, seed=0)
    models = [mlp(6, 1, torch.float64) for _ in range(workers)]
    optimizers = [sgd(model.parameters()) for model in models]
    weights = [0] * workers
    for step in range(steps):
        parts = order.microbatches_of(step)
        for rank, share in enumerate(even(len(parts), workers)):
            samples = [sample for part in share for sample in parts[part]]
            if samples:
                features, target = data[samples]
                optimizers[rank].zero_grad()
                functional.mse_loss(models[rank](features), target).backward()
                optimizers[rank].step()
                weights[rank] += len(samples)
        if (step + 1) % every == 0 or step == steps - 1:
            for value in zip(*(model.parameters() for model in models)):
                states = [optimizers[rank].state[one]["momentum_buffer"] for rank, one in enumerate(value)]
                for tensors in (value, states):
                    mean = sum(tensor.detach() * weight for tensor, weight in zip(tensors, weights)) / sum(weights)
                    for tensor in tensors:
                        tensor.data.copy_(mean)
            weights = [0] * workers
    return {"values": torch.cat([value.detach().flatten() for value in models[0].parameters()]).tolist()}

tell(found=train(start(every=3), 8), wanted=pipedream_reference(3, 3, 8))
"""


def test_each_worker_trains_alone_in_between(printed: Printed, tmp_path: Path) -> None:
    check_equal(printed(HEAD + BY_HAND, 3, tmp_path), "found", "wanted", losses=False)


PRINTS = """
session = start(os.environ["STRATEGY"], every=3, after=4)
prints = []
for batch in session.batches(steps=9):
    session.step(batch)
    prints.append(session.fingerprint())
tell(prints=prints)
"""


def test_synchronous_steps_come_first(printed: Printed, tmp_path: Path) -> None:
    """``after`` steps with the bits of all-reduce; then models part, and meet again after every 3 steps."""
    first, *others = (
        one["prints"] for one in printed(HEAD + PRINTS, 3, tmp_path, environment={"STRATEGY": "local-sgd"})
    )
    plain = printed(HEAD + PRINTS, 3, tmp_path, environment={"STRATEGY": "allreduce"})[0]["prints"]
    assert first[:4] == plain[:4] and first[4] != plain[4]
    for other in others:
        assert [one == two for one, two in zip(first, other, strict=True)] == [True] * 4 + [False, False, True] + (
            [False] * 2
        )


WAITING = """
done = Path(os.environ["PACELINE_RUN"]) / "first is ahead"

def forward(model, microbatch):
    deadline = time.monotonic() + 30
    while session.rank == 1 and session.position == 1 and not done.exists():
        assert time.monotonic() < deadline, "the first worker waits"
        time.sleep(0.005)
    features, target = microbatch
    return functional.mse_loss(model(features), target)

session = start(every=5, forward=forward)
for batch in session.batches(steps=10):
    session.step(batch)
    if session.rank == 0 and batch.step == 3:
        done.touch()
tell(fingerprint=session.fingerprint())
"""


@pytest.mark.sampled(1)
@WAYS
def test_nobody_waits_between_two_averages(printed: Printed, tmp_path: Path, one_machine: bool) -> None:
    """The second worker does not finish its step 1 before the first one has done step 3."""
    environment = {"PACELINE_RUN": str(tmp_path)}
    first, second = printed(HEAD + WAITING, 2, tmp_path, environment=environment, one_machine=one_machine)
    assert first == second
    events = [json.loads(line) for line in (tmp_path / "events" / "rank-0.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "average"] == [4, 9]


LEFT_OUT = """
session = start(every=3)
for batch in session.batches(steps=10):
    if batch.step % 3 != 2:
        session.step(batch)
tell(fingerprint=session.fingerprint())
"""


def test_steps_that_the_script_leaves_out_are_not_counted(printed: Printed, tmp_path: Path) -> None:
    first, second = printed(HEAD + LEFT_OUT, 2, tmp_path, environment={"PACELINE_RUN": str(tmp_path)})
    assert first == second
    events = [json.loads(line) for line in (tmp_path / "events" / "rank-0.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "average"] == [3, 7, 9]


SAVED = """
def conv(**more):
    case = CASES["batch norm, dropout, short batch"]()
    return paceline.start(**case | {"strategy": "local-sgd", "local": {"every": 4}, "checkpoint": kept} | more)

kept = {"directory": os.environ["KEPT"], "every": 6}
session = conv(resume="auto")
measured = []
for batch in session.batches(steps=int(os.environ["STEPS"])):
    session.step(batch)
    if session.position == 10:
        measured.append(session.evaluate(images(30)))
tell(fingerprint=session.fingerprint(), measured=measured)
"""


@pytest.mark.slow
def test_checkpoints_and_evaluations(printed: Printed, tmp_path: Path) -> None:
    """A run that goes on from a checkpoint has the bits of one that was not interrupted; all workers agree."""

    def run(folder: str, steps: int, workers: int = 3) -> list[dict[str, Any]]:
        return printed(
            HEAD + SAVED, workers, tmp_path, environment={"KEPT": str(tmp_path / folder), "STEPS": str(steps)}
        )

    whole = run("one", 11)
    run("two", 7)
    (tmp_path / "three").symlink_to(tmp_path / "two")
    others = run("three", 8, workers=2)
    assert others == [others[0]] * 2
    resumed = run("two", 11)
    assert whole == [whole[0]] * 3 == resumed
    assert len(whole[0]["measured"]) == 1


REMARKS = """
session = start(every=3)
reports = [session.step(batch) for batch in session.batches(steps=3)]
tell(notes=reports[-1].notes, losses=[report.loss for report in reports])
"""


def test_the_loss_is_global_where_models_are_averaged(printed: Printed, tmp_path: Path) -> None:
    first, second = printed(HEAD + REMARKS, 2, tmp_path)
    assert [one == two for one, two in zip(first["losses"], second["losses"], strict=True)] == [False, False, True]
    assert any("averaged after every 3 steps" in note for note in first["notes"])
