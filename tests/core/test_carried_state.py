"""A state that goes from batch to batch, and samplers: as in plain PyTorch, on any number of workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.data.recurrent.carried import CarriedState
from paceline.data.sampler import SampledOrder

Printed = Callable[..., list[dict[str, Any]]]

RECURRENT = """
import os
from functools import partial
import torch
import paceline
from subjects import tell

torch.manual_seed(1)
tokens = torch.randint(0, 12, (8 * 30 + 5,))

class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(12, 8), torch.nn.Linear(8, 12)
        self.recurrent = torch.nn.LSTM(8, 8, 2)
    def begin(self, rows):
        return torch.zeros(2, rows, 8), torch.zeros(2, rows, 8)
    def forward(self, tokens, hidden):
        output, hidden = self.recurrent(self.embedding(tokens), hidden)
        return self.head(output).flatten(0, 1), hidden

def forward(model, microbatch, hidden):
    data, target = (one.t() for one in microbatch)
    output, hidden = model(data, model.begin(data.shape[1]) if hidden is None else hidden)
    return torch.nn.functional.cross_entropy(output, target.flatten()), hidden

def start(forward=forward, **changes):
    torch.manual_seed(0)
    given = dict(
        model=Recurrent(), optimizer=partial(torch.optim.SGD, lr=1.0), forward=forward, clip_norm=0.25,
        data=paceline.TokenRows(tokens, rows=8, length=6), batch=8, microbatches=4,
    )
    return paceline.start(**given | changes)

def train(**settings):
    session = start(**settings)
    losses = [session.step(batch).loss for _ in range(2) for batch in session.batches(epochs=1)]
    return [losses, session.fingerprint(), session.evaluate(paceline.TokenRows(tokens.flip(0), rows=6, length=5))]

def plain():
    torch.manual_seed(0)
    model, losses = Recurrent(), []
    data = tokens[: 8 * 30].view(8, 30).t()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for epoch in range(2):
        hidden = model.begin(8)
        for begin in range(0, 29, 6):
            end = min(begin + 6, 29)
            output, hidden = model(data[begin:end], tuple(one.detach() for one in hidden))
            loss = torch.nn.functional.cross_entropy(output, data[begin + 1 : end + 1].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            losses.append(loss.item())
    rows = tokens.flip(0)[: 6 * (len(tokens) // 6)].view(6, -1).t()
    with torch.no_grad():  # segments are alike in an evaluation, so the whole text at once is the mean over them
        output, _ = model(rows[:-1], model.begin(6))
        kept = [torch.nn.functional.cross_entropy(part, target.flatten()).item()
            for part, target in zip(output.split(6 * 5), rows[1:].split(5))]
    return losses, sum(kept) / len(kept)
"""

SAME = (
    RECURRENT
    + """
tell(
    plain=plain(),
    fast=train(),
    trained=[train(exact=True, strategy=one) for one in os.environ["STRATEGIES"].split()],
)
wrong = {}
for name, changes in {
    "local": {"strategy": "local-sgd"},
    "rows": {"batch": 4},
    "short": {"data": [(torch.zeros(3, dtype=int),) * 2] * 12},
    "no pair": {"forward": lambda model, microbatch, hidden: forward(model, microbatch, hidden)[0]},
}.items():
    try:
        session = start(**changes)
        for batch in session.batches(steps=1):
            session.step(batch)
    except paceline.PacelineError as error:
        wrong[name] = str(error)
tell(wrong=wrong)
"""
)


def test_a_carried_state_is_that_of_plain_training(printed: Printed, tmp_path: Path) -> None:
    (alone,) = printed(SAME, 1, tmp_path, environment={"STRATEGIES": "allreduce"})
    several = {"STRATEGIES": "allreduce stealing parameter-server"}
    both = printed(SAME, 2, tmp_path, environment=several)
    assert len(alone["plain"][0]) == 10
    for one in (alone, *both):
        (losses, _, evaluated), (plain, plainly) = one["fast"], one["plain"]
        assert max(abs(a - b) for a, b in zip(plain, losses, strict=True)) < 1e-5
        assert abs(evaluated - plainly) < 1e-5
        assert all(trained == alone["trained"][0] for trained in one["trained"])
    for one in both:
        wrong = one["wrong"]
        assert "strategy 'local-sgd' cannot carry" in wrong["local"]
        assert "8 rows of tokens, but batch = 4" in wrong["rows"]
        assert "4 samples instead of 8" in wrong["short"]
        assert "pair (loss, next state)" in wrong["no pair"]


SAMPLED = """
import os
from functools import partial
import torch
import paceline
from subjects import classes, tell

data = classes(40)
lengths = [len(range(place % 7 + 1)) for place in range(40)]

def bucketed(seed, epoch):
    # batches of like length in a random order; each epoch has some samples more
    chosen = torch.randperm(40)[: 24 + 4 * epoch].tolist()
    return sorted(chosen, key=lambda place: lengths[place])

def train(sampler, steps=None, **settings):
    torch.manual_seed(0)
    session = paceline.start(
        model=torch.nn.Linear(12, 4), optimizer=partial(torch.optim.SGD, lr=0.1), data=data, batch=16, exact=True,
        loss=torch.nn.functional.cross_entropy, sampler=sampler, **settings,
    )
    sizes = []
    for epoch in range(3):
        for batch in session.batches(epochs=1):
            if session.position == steps:
                return str(session.save())
            session.step(batch)
            sizes.append(batch.samples)
    return [sizes, session.fingerprint(), session.steps_per_epoch]

weighted = torch.utils.data.WeightedRandomSampler([1.0 + place for place in range(40)], 20)
saved = {"directory": os.environ["SAVED"]}
tell(bucketed=train(bucketed), weighted=train(weighted), saved=train(bucketed, 3, checkpoint=saved))
tell(resumed=train(bucketed, checkpoint=saved, resume="auto"))
try:
    train(weighted, checkpoint=saved, resume="auto")
except paceline.CheckpointError as error:
    tell(refused=str(error))
"""


def test_a_sampler_gives_the_same_on_any_number_of_workers(printed: Printed, tmp_path: Path) -> None:
    found = []
    for workers in (1, 3):
        found += printed(SAMPLED, workers, tmp_path, environment={"SAVED": str(tmp_path / f"saved-{workers}")})
    for one in found:
        assert one["bucketed"] == found[0]["bucketed"]
        assert one["weighted"] == found[0]["weighted"]
        assert one["bucketed"][0] == [16, 8, 16, 12, 16, 16]
        assert one["weighted"][0] == [16, 4] * 3
        # of 3 steps done the last batch comes once more, as the lines behind its step may not have run
        assert one["resumed"] == [one["bucketed"][0][2:], *one["bucketed"][1:]]
        assert "another order of samples: sampler" in one["refused"]


def test_a_forward_pass_may_change_its_state() -> None:
    """It may be computed again, by whoever repeats the step."""

    def forward(model: torch.nn.Module, data: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return state.add_(1).sum(), state

    order = SampledOrder(lambda seed, epoch: range(8), 8, 4, 1, 0, False)
    carried = CarriedState(forward, order, torch.device("cpu"))
    carried.accept(0, {0: torch.zeros(1)})
    assert [carried.forward(torch.nn.Identity(), None, 1, 0).item() for _ in range(2)] == [1.0, 1.0]
