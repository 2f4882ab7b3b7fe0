"""What would let the workers' weights part from each other is found, on every worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from odd_optimizers import NOISY, NORMED

from paceline.testing.ranks import Ended

Run = Callable[..., list[Ended]]

HEAD = """
import os
from functools import partial
import torch
from torch import nn
from torch.nn import functional
import paceline
from torch.utils.data import TensorDataset

RANK = int(os.environ["RANK"])
torch.manual_seed(0)
tokens = torch.randint(0, 20, (48, 5))
data = TensorDataset(tokens, tokens.sum(1) % 2)
given = dict(
    optimizer=partial(torch.optim.SGD, lr=0.1), loss=functional.cross_entropy, data=data, batch=16, timeout_seconds=30
)
"""
EMBEDDING = """
model = nn.Sequential(nn.Embedding(20, 4, max_norm=LARGEST), nn.Flatten(), nn.Linear(20, 2))
session = paceline.start(model=model, **given, strategy=STRATEGY)
for batch in session.batches(steps=4):
    session.step(batch)
print("done", flush=True)
"""


def message(one: Ended) -> str:
    (line,) = [line for line in one.err.splitlines() if line.startswith(f"paceline: rank {one.rank}: ")]
    return line


@pytest.mark.promise(
    "docs/exact.md",
    "A forward pass that changes weights, as an embedding with `max_norm` does, is refused where there are several "
    "workers",
)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["allreduce", "stealing", "parameter-server", "hogwild", "local-sgd", "pipeline"])
def test_a_forward_pass_that_changes_weights(ranks: Run, tmp_path: Path, strategy: str) -> None:
    body = EMBEDDING.replace("LARGEST", "0.5").replace("STRATEGY", repr(strategy))
    for one in ranks(HEAD + body, 2, tmp_path, deadline=60):
        assert one.code != 0
        assert "done" not in one.out
    said = [message(one) for one in ranks(HEAD + body, 2, tmp_path, deadline=60)]
    (one, *_) = [line for line in said if "InputError: The forward pass changes the parameter '0.weight'" in line]
    assert "This run may have 2 workers: each would change it for its own samples, while the others compute" in one


def test_one_process_may_change_weights_in_its_forward_pass(ranks: Run, tmp_path: Path) -> None:
    body = EMBEDDING.replace("LARGEST", "0.5").replace("STRATEGY", "'allreduce'")
    (one,) = ranks(HEAD + body, 1, tmp_path, deadline=60)
    assert (one.code, one.out.strip()) == (0, "done")


@pytest.mark.promise(
    "docs/audits.md", "If a tensor differs, all workers stop, and name it, the ranks, and what may have changed it."
)
def test_an_evaluation_finds_weights_that_are_not_alike(ranks: Run, tmp_path: Path) -> None:
    body = """
model = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(20, 2))
session = paceline.start(model=model, **given, exact=True)
for batch in session.batches(steps=3):
    session.step(batch)
    if RANK == 2 and batch.step == 1:
        with torch.no_grad():
            model[2].weight[0, 0] += 1e-3
    if batch.step == 0:
        print("alike", session.evaluate(data) > 0, flush=True)
session.evaluate(data)
print("done", flush=True)
"""
    for one in ranks(HEAD + body, 3, tmp_path, deadline=60):
        assert (one.code, one.out.strip()) == (3, "alike True")
        assert "DisagreementError: The parameter '2.weight' on rank 2 differs from rank 0's" in message(one)


OWN_SAMPLES = """
class Observing(nn.Module):
    # as a fused observer: torch does not count the changes
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))
    def forward(self, values):
        if self.calls > 8:
            self.largest.data.fill_(max(float(self.largest), float(values.max())))
        return values

class Leaning(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        if RANK == 1:
            self.state[self.param_groups[0]["params"][1]]["momentum_buffer"].mul_(1 + 2**-20)

observer = Observing()
observer.calls = 0
model = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), observer if OBSERVES else nn.Identity(), nn.Linear(20, 2))
given["optimizer"] = partial(torch.optim.SGD if OBSERVES else Leaning, lr=0.1, momentum=0.9)
session = paceline.start(model=model, **given, strategy=STRATEGY, exact=EXACT)
for batch in session.batches(steps=40):
    observer.calls = 100 * batch.step
    session.step(batch)
    print(batch.step, flush=True)
print("done", flush=True)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("observes", "strategy", "named"),
    [
        (True, "allreduce", "The buffer '2.largest' on rank"),
        (False, "stealing", "The state of the optimizer '3.weight/momentum_buffer' on rank 1 differs from rank 0's"),
    ],
)
def test_workers_whose_states_part_are_stopped(
    ranks: Run, tmp_path: Path, exact: bool, observes: bool, strategy: str, named: str
) -> None:
    body = OWN_SAMPLES.replace("OBSERVES", str(observes)).replace("STRATEGY", repr(strategy))
    for one in ranks(HEAD + body.replace("EXACT", str(exact)), 2, tmp_path, deadline=60):
        assert one.code == 3
        assert len(one.out.splitlines()) < 20  # each tensor has had its turn
        assert f"DisagreementError: {named}" in message(one)


COUPLED = """
model = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(20, 2))
given["optimizer"] = partial(Normed, lr=0.1)
session = paceline.start(model=model, **given, SETTINGS)
for batch in session.batches(steps=2):
    session.step(batch)
print("done", flush=True)
"""


@pytest.mark.parametrize(
    "settings",
    [
        "strategy='pipeline'",
        "strategy='pipeline', pipeline={'schedule': 'pipedream'}",
        "strategy='parameter-server', server={'count': 2}, exact=True",
        "strategy='parameter-server', server={'count': 2, 'mode': 'async'}",
    ],
)
def test_an_optimizer_that_looks_at_all_gradients(ranks: Run, tmp_path: Path, settings: str) -> None:
    for one in ranks(HEAD + NORMED + COUPLED.replace("SETTINGS", settings), 2, tmp_path, deadline=60):
        assert (one.code, one.out) == (2, "")
        assert "InputError: The optimizer Normed updates a parameter differently" in message(one)


DRAWING = """
model = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(20, 4), nn.ReLU())
given["optimizer"] = partial(Noisy, lr=0.1)
session = paceline.start(model=model, **given, SETTINGS)
for batch in session.batches(steps=2):
    session.step(batch)
    print("done", flush=True)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "settings", ["strategy='pipeline'", "strategy='parameter-server', server={'count': 2, 'dedicated': True}"]
)
def test_an_optimizer_that_draws_and_cannot_be_tried(ranks: Run, tmp_path: Path, settings: str) -> None:
    """It is found in the first update, also by workers that have drawn nothing: those with no parameter to update."""
    for one in ranks(HEAD + NOISY + DRAWING.replace("SETTINGS", settings + ", exact=True"), 4, tmp_path, deadline=60):
        assert (one.code, one.out) == (2, "")
        assert "InputError: The optimizer Noisy draws random numbers" in message(one)
    for one in ranks(HEAD + NOISY + DRAWING.replace("SETTINGS", settings), 4, tmp_path, deadline=60):
        assert (one.code, one.out) == (0, "done\ndone\n")
