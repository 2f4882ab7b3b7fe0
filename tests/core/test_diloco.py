"""Replicas that train on their own, and outer steps: the same bits on any number of workers, and when they wait."""

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

adamw = partial(torch.optim.AdamW, lr=0.01)

def start(strategy="diloco", every=3, after=0, replicas=4, **more):
    given = {"model": mlp(6, 1, torch.float64), "optimizer": adamw, "data": numbers(100), "batch": 48}
    if "forward" not in more:
        given["loss"] = functional.mse_loss
    local = {"every": every, "after": after, "replicas": replicas}
    return paceline.start(**given | {"strategy": strategy, "local": local} | more)

STREAMING = {"every": 4, "fragments": 2, "delay": 1, "mixing": 0.5}

def values(session):
    return torch.cat([value.detach().flatten() for value in session._context.compute.model.parameters()]).tolist()

def train(session, steps):
    losses = [session.step(batch).loss for batch in session.batches(steps=steps)]
    return {"losses": losses, "values": values(session), "fingerprint": session.fingerprint()}
"""


def check_equal(one: dict[str, Any], other: dict[str, Any], losses: bool = True) -> None:
    assert one["values"] == pytest.approx(other["values"], rel=1e-9, abs=1e-13)
    if losses:
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-9, abs=0)


# 8 microbatches; the last batch of an epoch has fewer, so some replicas have none
ALIKE = """
def case(**more):
    given = {"exact": True, "clip_norm": 1.0} | CASES["batch norm, dropout, short batch"]() | more
    return train(start(**given), 7)

tell(
    diloco=case(), after=case(strategy="local-sgd", every=2, after=2), average=case(average="ema"),
    int8=case(wire="int8"), fixed=case(exact="fixed-point"),
    streaming=case(local=STREAMING), streaming_int4=case(local=STREAMING, wire="int4"),
    sparse=case(local=STREAMING, wire="topk-2bit"),
)
"""
BY_HAND = """
def by_hand(replicas, every, steps, fragments=((0, 1, 2, 3),), delay=0, mixing=0.0):
    data, order = numbers(100), Order(100, 48, 8, seed=0)
    outer, models = mlp(6, 1, torch.float64), [mlp(6, 1, torch.float64) for _ in range(replicas)]
    inner = [adamw(model.parameters()) for model in models]
    weights = list(outer.parameters())
    owned = [[weights[place] for place in places] for places in fragments]
    nesterov = [torch.optim.SGD(part, lr=0.7, momentum=0.9, nesterov=True) for part in owned]
    counts, flying, age = [[0] * replicas for _ in fragments], None, 0
    for step in range(steps):
        parts = order.microbatches_of(step)
        for number, share in enumerate(even(len(parts), replicas)):
            samples = [sample for part in share for sample in parts[part]]
            if samples:
                features, target = data[samples]
                inner[number].zero_grad()
                functional.mse_loss(models[number](features), target).backward()
                inner[number].step()
                for fragment in counts:
                    fragment[number] += len(samples)
        held = [list(model.parameters()) for model in models]
        if (step + 1) % (every // len(fragments)) == 0:
            flying, age = step // (every // len(fragments)) % len(fragments), 0
            for place in fragments[flying]:
                of = counts[flying]
                mean = sum(one[place].detach() * count for one, count in zip(held, of)) / sum(of)
                weights[place].grad = weights[place].detach() - mean
            counts[flying] = [0] * replicas
        if flying is not None and age == delay:
            nesterov[flying].step()
            for place in fragments[flying]:
                for one in held:
                    one[place].data = mixing * one[place].data + (1 - mixing) * weights[place].data
            flying = None
        age += 1
    return {"values": torch.cat([value.detach().flatten() for value in outer.parameters()]).tolist()}

sgd = {"optimizer": partial(torch.optim.SGD, lr=0.05)}
tokens = {"data": Sentences(90), "batch": 32, "forward": per_token} | sgd
tell(
    diloco=train(start(), 9), by_hand=by_hand(4, 3, 9),
    streaming=train(start(local=STREAMING), 9), streaming_by_hand=by_hand(4, 4, 9, ((0,), (1, 2, 3)), 1, 0.5),
    average=train(start("local-sgd", every=1, **sgd), 6), plain=train(start("allreduce", **sgd), 6),
    average_tokens=train(start("local-sgd", every=1, model=transformer(0.0).double(), **tokens), 5),
    plain_tokens=train(start("allreduce", model=transformer(0.0).double(), **tokens), 5),
)
"""


def test_the_bits_do_not_depend_on_the_workers(printed: Printed, tmp_path: Path) -> None:
    """The fingerprints also cover replicas that have made a step since the last outer step."""
    (alone,), three = (printed(HEAD + ALIKE, workers, tmp_path) for workers in (1, 3))
    for name, found in alone.items():
        assert {one[name]["fingerprint"] for one in three} == {found["fingerprint"]}, name
        assert all(one[name]["values"] == found["values"] for one in three), name
    assert len({found["fingerprint"] for found in alone.values()}) == len(alone)


EIGHT = """
tell(**train(start(exact=True, replicas=8, **CASES["batch norm, dropout, short batch"]()), 7))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "one_machine"), [(5, True), (8, True), (4, False)])
def test_eight_replicas(printed: Printed, tmp_path: Path, workers: int, one_machine: bool) -> None:
    (alone,) = printed(HEAD + EIGHT, 1, tmp_path)
    several = printed(HEAD + EIGHT, workers, tmp_path, one_machine=one_machine)
    assert {one["fingerprint"] for one in several} == {alone["fingerprint"]}


def test_the_numbers_are_those_of_the_papers(printed: Printed, tmp_path: Path) -> None:
    """DiLoCo in plain torch; and a mean after each step of SGD is all-reduce, also where samples count differently."""
    (found,) = printed(HEAD + BY_HAND, 1, tmp_path)
    check_equal(found["diloco"], found["by_hand"], losses=False)
    check_equal(found["streaming"], found["streaming_by_hand"], losses=False)
    check_equal(found["average"], found["plain"])
    check_equal(found["average_tokens"], found["plain_tokens"])


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
def test_nobody_waits_between_two_outer_steps(printed: Printed, tmp_path: Path, one_machine: bool) -> None:
    """The second worker does not finish its step 1 before the first one has done step 3."""
    environment = {"PACELINE_RUN": str(tmp_path)}
    first, second = printed(HEAD + WAITING, 2, tmp_path, environment=environment, one_machine=one_machine)
    assert first == second
    events = [json.loads(line) for line in (tmp_path / "events" / "rank-0.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "outer-step"] == [4, 9]


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
    assert [event["step"] for event in events if event["event"] == "outer-step"] == [3, 7]


SAVED = """
kept = {"directory": os.environ["KEPT"], "every": 6}
case = CASES["batch norm, dropout, short batch"]()
case |= {"local": STREAMING, "exact": True, "wire": os.environ["WIRE"], "checkpoint": kept, "resume": "auto"}
session = start(**case)
measured = []
for batch in session.batches(steps=int(os.environ["STEPS"])):
    session.step(batch)
    if session.position == 10:
        measured.append(session.evaluate(images(30)))
tell(fingerprint=session.fingerprint(), measured=measured)
"""


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["float32", "int4", "topk-2bit"])
def test_checkpoints_and_evaluations(printed: Printed, tmp_path: Path, wire: str) -> None:
    """A run that is saved with a fragment in flight, and resumed on other workers, has the bits of one process."""

    def run(folder: str, steps: int, workers: int) -> list[dict[str, Any]]:
        environment = {"KEPT": str(tmp_path / folder), "STEPS": str(steps), "WIRE": wire}
        return printed(HEAD + SAVED, workers, tmp_path, environment=environment)

    whole = run("one", 11, 1)
    run("two", 7, 3)
    assert run("two", 11, 2) == whole * 2
    assert len(whole[0]["measured"]) == 1


ANOTHER = """
from paceline.errors import PacelineError

def saved(steps, folder, **more):
    kept = {"directory": os.environ["KEPT"] + folder}
    session = start(**{"resume": "auto", "checkpoint": kept, **more})
    for batch in session.batches(steps=steps):
        session.step(batch)
    return session

def refused(*given, **more):
    try:
        saved(*given, **more)
    except PacelineError as error:
        return str(error)

saved(2, "1").save()
shorter = refused(4, "1", every=2)
again = saved(3, "1")
again.save()
longer = refused(6, "1", every=6)  # the period is over
saved(5, "2", local=STREAMING, replicas=4).save()
in_flight = refused(6, "2", local=STREAMING | {"delay": 0})

own_weights = STREAMING | {"every": 2, "fragments": 1, "delay": 0}
saved(2, "5", local=own_weights).save()
mixed = [saved(4, folder, local=own_weights).fingerprint() for folder in "56"]

saved(2, "3", strategy="allreduce", wire="topk").save()
session = saved(4, "3")
session.save()
left = [name for name in session._context.replicas if "feedback" in name]
auto = refused(1, "4", strategy="allreduce", wire="topk", checkpoint={"directory": os.environ["KEPT"], "every": "auto"})
session = start(local=STREAMING | {"every": 4, "fragments": 1}, average={"kind": "ema", "decay": 0.5, "every": 4})
for batch in session.batches(steps=9):
    session.step(batch)
first = [value.tolist() for value in mlp(6, 1, torch.float64).state_dict().values()]
with session.averaged():
    average = [value.tolist() for value in session.model_state().values()]
adaptive = {"exact": True, "local": {"every": 5, "adaptive": True}}
whole = values(saved(19, "7", **adaptive))
saved(16, "8", **adaptive).save()  # in a period of 3 steps, after 3 periods of 5
adapted = values(saved(19, "8", **adaptive)) == whole
flying = {"every": 5, "delay": 1, "adaptive": True}
saved(17, "9", local=flying).save()
periods = [saved(steps, "9", local=flying | more)._context.strategy_state["local"]["period"]
           for steps, more in ((17, {}), (22, {"adaptive": False}))]
tell(
    shorter=shorter, longer=longer, in_flight=in_flight, mixed=mixed, left=left, auto=auto,
    averages=average != first, adapted=adapted, periods=periods,
)
"""


def test_another_period_format_or_strategy(printed: Printed, tmp_path: Path) -> None:
    (found,) = printed(HEAD + ANOTHER, 1, tmp_path, environment={"KEPT": str(tmp_path / "kept")})
    assert "local.every = 3, but local.every = 2 now" in found["shorter"]
    assert found["longer"] is None
    assert "local.delay = 1, but local.delay = 0 now" in found["in_flight"]
    assert found["mixed"][0] == found["mixed"][1]  # a resumed run, and one that was not stopped
    assert found["left"] == [], "errors of the format before"
    assert "checkpoint.every = 'auto'" in found["auto"] and "wire = 'topk' does not give" in found["auto"]
    assert found["adapted"]
    assert found["periods"][0] < 5 and found["periods"][1] == 5, "of a run that was to adapt, and does not any more"
    assert found["averages"], "an outer step that lands later counts as the step after which it was sent"


REMARKS = """
session = start(every=3)
reports = [session.step(batch) for batch in session.batches(steps=3)]
tell(notes=reports[-1].notes, losses=[report.loss for report in reports])
"""


def test_the_loss_is_global_after_an_outer_step(printed: Printed, tmp_path: Path) -> None:
    first, second = printed(HEAD + REMARKS, 2, tmp_path)
    assert [one == two for one, two in zip(first["losses"], second["losses"], strict=True)] == [False, False, True]
    assert any("an outer step after every 3 steps" in note for note in first["notes"])


COUNTERS = """
class Counting(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step(closure)

session = start(optimizer=partial(Counting, lr=0.01))
try:
    for batch in session.batches(steps=1):
        session.step(batch)
except paceline.InputError as error:
    tell(said=str(error))
"""


def test_an_optimizer_that_counts_in_its_groups_is_refused(printed: Printed, tmp_path: Path) -> None:
    """It would count once for each replica that a worker has."""
    (one,) = printed(HEAD + COUNTERS, 1, tmp_path)
    assert "Counting changes 'k' in its parameter groups with each update" in one["said"]
