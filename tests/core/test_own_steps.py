"""What is left of a script's own training loop beside ``session.step``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
from torch.nn import functional
import torch
import paceline
from paceline.training.recovery.standby import warm_up
from subjects import classes, mlp, tell

def start(strategy="allreduce", **more):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = dict(model=model, optimizer=lambda model: optimizer, loss=functional.cross_entropy, data=classes(128))
    session = paceline.start(**given | dict(batch=32, strategy=strategy, exact=EXACT, timeout_seconds=60) | more)
    return model, optimizer, session

def backward(model):
    functional.cross_entropy(model(torch.ones(3, 12)), torch.tensor([0, 1, 2])).backward()
"""

LEFT = """
found = {}
for strategy in STRATEGIES:
    model, optimizer, session = start(strategy)
    try:
        for batch in session.batches(steps=3):
            optimizer.zero_grad()
            session.step(batch)
            optimizer.step()
    except paceline.InputError as error:
        found[strategy] = [batch.step, str(error)]
tell(**found)
"""


@pytest.mark.parametrize(
    ("strategies", "exact"),
    [(["allreduce", "stealing", "parameter-server", "pipeline"], True), (["hogwild", "local-sgd"], False)],
    ids=["synchronous", "not synchronous"],
)
@pytest.mark.promise(
    "docs/train.md", "a script's own `optimizer.step()`, left over from its loop for one process, is an error."
)
def test_a_step_of_the_optimizer_is_refused(
    printed: Printed, tmp_path: Path, strategies: list[str], exact: bool
) -> None:
    script = (HEAD + LEFT).replace("STRATEGIES", repr(strategies)).replace("EXACT", repr(exact))
    for told in printed(script, 2, tmp_path):
        assert list(told) == strategies
        for step, said in told.values():
            assert step == 0
            assert said.startswith("The script calls step() of the optimizer AdamW, which session.step(batch) does: ")


HARMLESS = """
found = set()
for own in (False, True):
    model, optimizer, session = start()
    for batch in session.batches(steps=4):
        if own:
            optimizer.zero_grad()
            backward(model)
        session.step(batch)
        if own:
            backward(model)
    found.add(session.fingerprint())
tell(hashes=len(found))
"""


def test_gradients_of_the_script_have_no_effect(printed: Printed, tmp_path: Path) -> None:
    for told in printed((HEAD + HARMLESS).replace("EXACT", "True"), 2, tmp_path):
        assert told["hashes"] == 1


SPARE = """
from dataclasses import replace

model, optimizer, session = start()
states = []
for strategy in ("allreduce", "sharded"):
    context = replace(session._context, settings=session._context.settings.model_copy(update={"strategy": strategy}))
    before = [value.clone() for value in model.parameters()]
    undo = warm_up(context, session._state)
    states.append(len(optimizer.state))
    undo()
    states.append(len(optimizer.state))
    assert all(map(torch.equal, before, model.parameters()))
tell(states=states)
"""


def test_a_spare_worker_warms_its_optimizer_up(printed: Printed, tmp_path: Path) -> None:
    (told,) = printed((HEAD + SPARE).replace("EXACT", "True"), 1, tmp_path)
    assert told["states"] == [4, 0, 1, 0], "a share needs no memory for the state of all parameters"
