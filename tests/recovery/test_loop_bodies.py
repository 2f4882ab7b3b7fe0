"""What a loop changes between two steps is the same after a worker was replaced or the run was resumed."""

from __future__ import annotations

from typing import Any

import pytest
from launching import Ran, Run
from test_join_and_leave import PATHS, on
from test_recovery import check

from paceline.testing import faults

# an average of the weights in the model, weights that are cut, a rate of dropout, a strength of the data, a counter
SCRIPT = """
import sys
import scripted
import torch
from subjects import classes, mlp
from torch import nn
from torch.utils.data import Dataset

SAVES, WAITS = SAVES_AT, WAITS_AT


class Noisy(Dataset):
    def __init__(self):
        self.data, self.strength = classes(100), 0.0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, place):
        value, target = self.data[place]
        return value * (1 + self.strength), target


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher, self.drop = mlp(), mlp().requires_grad_(False), nn.Dropout(0.1)
        self.temperature = 1.0

    def forward(self, values):
        return self.student(self.drop(values)) / self.temperature + 0.1 * self.teacher(values)


data, model = Noisy(), Student()
session = scripted.begin(model=model, data=data, **GIVEN)
kept = session.register(seen=0)
for batch in session.batches(steps=12):
    if batch.step in WAITS:
        scripted.await_joiner(session)
    scripted.say(session, session.step(batch))
    for mean, one in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        mean.data.mul_(0.9).add_(one.data, alpha=0.1)
    if batch.step == 4:
        model.drop.p = 0.5
    if batch.step in (1, 4):  # first in a step without a collective call: there is no copy from before the first change
        with torch.no_grad():
            model.student[0].weight[:2] *= 0.5
    model.temperature *= 1.1
    data.strength = batch.step / 20
    session.optimizer.param_groups[0]["weight_decay"] = batch.step / 1000
    kept.seen += batch.samples
    if batch.step in SAVES:
        session.save()
    if batch.step % 5 == 4:
        session.evaluate(classes(30))
scripted.end(session, p=model.drop.p, temperature=model.temperature, seen=kept.seen)
"""


def script(saves: tuple[int, ...] = (), waits: tuple[int, ...] = (), **given: object) -> str:
    text = SCRIPT.replace("SAVES_AT", repr(saves)).replace("WAITS_AT", repr(waits))
    return text.replace("**GIVEN", f"schedule=None, batch=32, microbatches=8, **{given!r}")


def is_right(ran: Ran, wanted: dict[str, Any], finishers: int) -> None:
    check(ran, wanted, finishers)
    for told in ran.printed():
        assert told == wanted, ran.report()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("step", "path"), [(1, "memory"), (5, "network"), (6, "memory"), (1, "network")])
def test_a_lost_worker_is_replaced_in_the_next_step(run: Run, undisturbed: Any, step: int, path: str) -> None:
    plan = faults.kill(rank=1, step=step)
    ran = run(on(path, script()), "-n", 2, "--elastic", "2:2", "--standby", 1, faults=plan)
    is_right(ran, undisturbed(script()), 2)


@pytest.mark.sampled(1)
@PATHS
@pytest.mark.parametrize("strategy", ["allreduce", "stealing"])
def test_a_worker_joins_at_the_end_of_a_step(run: Run, undisturbed: Any, path: str, strategy: str) -> None:
    text = on(path, script(waits=(5,), strategy=strategy))
    ran = run(text, "-n", 3, "--elastic", "2:3", faults=faults.kill(rank=2, step=2))
    is_right(ran, undisturbed(script(waits=(5,))), 3)


@pytest.mark.sampled(1)
@PATHS
def test_a_lost_worker_is_replaced_in_an_evaluation(run: Run, undisturbed: Any, path: str) -> None:
    plan = faults.kill(rank=1, step=9, point="in evaluate")
    ran = run(on(path, script()), "-n", 2, "--elastic", "2:2", "--standby", 1, faults=plan)
    is_right(ran, undisturbed(script()), 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("saves", "of"), [((), (8, 7)), ((6,), (7,))], ids=["at the error, due", "in the loop"])
def test_a_resumed_run(run: Run, undisturbed: Any, saves: tuple[int, ...], of: tuple[int, ...]) -> None:
    every = {} if saves else {"checkpoint": {"every": 7, "background": False}}
    ended = run(script(saves, **every), "-n", 2, faults=faults.error(rank=1, step=8))
    assert ended.code != 0 and ended.saved() == [7, 8], ended.report()
    for step in of:
        checkpoint = ended.run / "checkpoints" / f"step-{step:06}"
        again = run(script(), "-n", 3, "--resume", checkpoint, name=f"from {step}")
        assert again.code == 0, again.report()
        assert again.printed() and all(told == undisturbed(script()) for told in again.printed()), again.report()


STAGES = """
import scripted
from subjects import mlp

model = mlp()
saves = {"every": 3, "background": False}
session = scripted.begin("mlp, momentum", model=model, strategy="pipeline", checkpoint=saves)
for batch in session.batches(steps=9):
    session.step(batch)
    CHANGE
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("[value.data.clamp_(-0.1, 0.1) for value in model.parameters()]", "parameter/"),
        ("model.temperature = batch.step", "model.temperature'"),
    ],
    ids=["weights", "an attribute"],
)
def test_going_back_would_leave_out_what_the_loop_changed(run: Run, change: str, named: str) -> None:
    ran = run(STAGES.replace("CHANGE", change), "-n", 3, "--elastic", "3:3", faults=faults.kill(rank=2, step=5))
    assert ran.code != 0, ran.report()
    assert f"its loop has changed '{named}" in ran.said and "--resume auto" in ran.said, ran.report()


def test_servers_that_do_not_wait_have_other_weights(run: Run) -> None:
    text = STAGES.replace('"pipeline"', '"parameter-server", server={"mode": "async"}, exact=False, schedule=None')
    ran = run(text.replace("CHANGE", "model[0].weight.data.mul_(0.5)"), "-n", 2)
    assert ran.code == 2, ran.report()
    assert "The loop has changed the parameter '0.weight'" in ran.said, ran.report()


ACTIVATION = """
import scripted
import torch
from subjects import mlp
from torch import nn

model = nn.Sequential(mlp(), nn.Identity())
model.act = torch.relu
model[1].register_forward_hook(lambda *given: model.act(given[2]))
session = scripted.begin("mlp, momentum", model=model, checkpoint={"every": 5, "background": False})
for batch in session.batches(steps=12):
    if batch.step == 6 and WAITS:
        scripted.await_joiner(session)
    if batch.step CHANGES:
        model.act = torch.tanh
    scripted.say(session, session.step(batch))
    if batch.step BEHIND:
        model.act = torch.tanh
scripted.end(session)
"""
NAMED = "The loop changed model.act in a completed step"


def activation(waits: bool, changes: str, behind: str = "< 0") -> str:
    return ACTIVATION.replace("WAITS", repr(waits)).replace("CHANGES", changes).replace("BEHIND", behind)


def test_a_joiner_that_would_compute_something_else_is_named(run: Run) -> None:
    ran = run(activation(True, "== 3"), "-n", 3, "--elastic", "2:3", faults=faults.kill(rank=2, step=5))
    assert ran.code == 2 and NAMED in ran.said, ran.report()
    assert "step 7 " not in ran.report(), "step 8 is audited in any case"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("changes", "behind", "warns"),
    [("== 3", "< 0", True), (">= 3", "< 0", False), ("< 0", ">= 2", False)],
    ids=["once", "before each step", "behind each step"],
)
def test_a_resumed_run_names_what_is_not_kept(run: Run, changes: str, behind: str, warns: bool) -> None:
    text = activation(False, changes, behind)
    ended = run(text, "-n", 2, faults=faults.error(rank=1, step=6))
    again = run(text, "-n", 2, "--resume", ended.run / "checkpoints" / "step-000005", name="two")
    assert again.code == 0 and (NAMED in again.report()) == warns, again.report()
