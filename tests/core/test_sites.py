"""Sites that keep their data: the result of federated averaging on any number of workers, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.data import Located
from paceline.errors import ConfigError, InputError
from paceline.strategies.local.sites import drawn

Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
import os
from functools import partial
import paceline, torch
from paceline.data import Located
from torch.nn import functional
from subjects import mlp, tell

SIZES = [17, 130, 40, 13, 64, 22, 90, 19, 55, 28]  # of the sites, whose targets differ, too
rank, workers = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

def site(number, wild):
    rows = torch.randn(SIZES[number], 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return torch.utils.data.TensorDataset(rows + number / 10, rows[:, :1] * (1e6 if number in wild else number))

def start(strategy="local-sgd", model=None, twice=False, wild=(), **local):
    held = [number for number in range(10) if rank in (number % workers, (number + twice) % workers)]
    torch.manual_seed(0)
    return paceline.start(
        model=model or mlp(6, 1, torch.float64), optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.5),
        loss=functional.mse_loss, data=Located({f"site {number}": site(number, wild) for number in held}), batch=32,
        exact=True, strategy=strategy, local={"sites": True, "every": 4} | local,
    )

def values(session):
    return torch.cat([value.detach().flatten() for value in session._context.compute.model.parameters()]).tolist()

def train(session, steps=9):
    for batch in session.batches(steps=steps):
        session.step(batch)
    return session.fingerprint()
"""

ALIKE = """
layers = torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1)
normed = torch.nn.Sequential(*layers)
tell(
    drawn=train(start(twice=True, sampled=0.5)), outer=train(start("diloco", outer_lr=0.5, model=normed.double())),
)
"""


@pytest.mark.parametrize(
    "workers", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_the_bits_do_not_depend_on_the_workers(printed: Printed, tmp_path: Path, workers: int) -> None:
    """Ten sites of other sizes and targets. A worker that has a copy of a shard may train it."""
    (alone,) = printed(HEAD + ALIKE, 1, tmp_path / "one")
    assert printed(HEAD + ALIKE, workers, tmp_path / "more") == [alone] * workers
    assert alone["drawn"] != alone["outer"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_bits_on_one_gpu_do_not_depend_on_the_workers(printed: Printed, tmp_path: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    (alone,) = printed(HEAD + ALIKE, 1, tmp_path / "one", environment=environment, deadline=300)
    assert printed(HEAD + ALIKE, 3, tmp_path / "more", environment=environment, deadline=300) == [alone] * 3


MASKED = """
clear = start(every=5)
found = {"clear": train(clear, 10), "values": values(clear)}
masked = start(every=5, masked=True)
found |= {"masked": train(masked, 10), "alike": values(masked)}
from paceline.strategies.local.masking.masked_sum import MaskedSum
mean, means = MaskedSum.mean, []

def spied(self, step, updates, weights, threshold):
    result = mean(self, step, updates, weights, threshold)
    if result:
        added, total = result[1], sum(weights[place] for place in result[1])
        own = sum((updates[place] * weights[place] for place in added if place in updates), torch.zeros(()))
        means.append([added, result[0].tolist(), (own / total).tolist()])
    return result

MaskedSum.mean = spied
without = train(start(masked=True, every=5, wild=(2, 5, 9)), 5)
few = start(masked=True, every=5, wild=(1, 2, 5, 9))
before = values(few)
train(few, 5)
tell(**found, without=without, means=means, unchanged=values(few) == before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_masks_leave_no_trace_in_the_sum(printed: Printed, tmp_path: Path, workers: int) -> None:
    """Three of ten sites have updates that are too large, and drop out when the others have masks with them."""
    pytest.importorskip("cryptography")
    (alone,) = printed(HEAD + MASKED, 1, tmp_path / "one")
    more = printed(HEAD + MASKED, workers, tmp_path / "more")
    ((added, mean, wanted),) = alone.pop("means")
    assert added == [0, 1, 3, 4, 6, 7, 8] and mean == pytest.approx(wanted, abs=1e-12)
    assert [one.pop("means")[0][:2] for one in more] == [[added, mean]] * workers
    assert more == [alone] * workers and alone["unchanged"]
    assert alone["alike"] == pytest.approx(alone["values"], rel=1e-9, abs=1e-12)


SENT = """
import re
from paceline.comm.world import World

gather, transfer, sent = World.gather, World.start_transfers, set()

def gathered(self, value, what):
    held = value if type(value) is tuple else [*value.values()][:1] if type(value) is dict else [value]
    sent.add(" ".join([re.sub("[0-9]+", "N", what), *(type(one).__name__ for one in held)]))
    return gather(self, value, what)

def transferred(self, sends, *more, **given):
    if sends and "gather" not in self.purpose:
        sent.add(" ".join([re.sub("[0-9]+", "N", self.purpose), *{str(one.tensor.dtype) for one in sends}]))
    return transfer(self, sends, *more, **given)

found = {}
for masked in (False, True):
    session = start(masked=masked, threshold=5)
    World.gather, World.start_transfers = gathered, transferred
    for batch in session.batches(steps=9):
        session.step(batch)
    World.gather, World.start_transfers = gather, transfer
    found[str(masked)] = sorted(sent)
    sent.clear()
tell(**found)
"""


@pytest.mark.slow
def test_what_leaves_a_site_in_a_step(printed: Printed, tmp_path: Path) -> None:
    """The kinds of messages between three workers, each on a machine of its own."""
    pytest.importorskip("cryptography")
    for one in printed(HEAD + SENT, 3, tmp_path, one_machine=False):
        # steps; samples of each site; names of metrics and buffers; the notice. Then digests of the model
        numbers = ["outer step after step N list dict tuple list int", "synchronizing dict dict dict"]
        assert one["False"] == ["in the all-reduce of bucket N of the gradients torch.float64", *numbers]
        assert one["True"] == [
            "in the all-reduce of bucket N of the masked updates torch.int64",
            "masked sum after step N PublicKeys",
            "masked sum after step N bool",  # whether shares were revealed before a loss
            "masked sum after step N dict",  # encrypted shares; shares of masks
            "masked sum after step N list",  # sites in the sum
            *numbers,
        ]


NOISY = """
session = start(masked=True, clip=2.0, noise=5.0, threshold=5)
tell(fingerprint=train(session, 8))
"""


@pytest.mark.slow
def test_noise_is_new_in_each_run_and_its_privacy_recorded(printed: Printed, tmp_path: Path) -> None:
    """All workers of a run have the same sums."""
    pytest.importorskip("cryptography")
    pytest.importorskip("opacus")
    runs = [printed(HEAD + NOISY, 2, tmp_path / name, environment={"PACELINE_RUN": str(tmp_path)}) for name in "ab"]
    assert [first == second for first, second in runs] == [True, True] and runs[0] != runs[1]
    lines = (tmp_path / "events" / "rank-0.jsonl").read_text().splitlines()
    spent = [event["epsilon"] for line in lines if (event := json.loads(line))["event"] == "outer-step"]
    assert len(spent) == 4 and spent[:2] == spent[2:] and 0 < spent[0] < spent[1]


BY_HAND = """
def by_hand(session, rounds):
    outer, context = mlp(6, 1, torch.float64), session._context
    data, order, local = context.feed._given, context.order, context.settings.local
    for number in range(rounds):
        trained, counts = [], []
        for one in drawn(0, number, 10, local.sampled):
            model, count = mlp(6, 1, torch.float64), 0
            model.load_state_dict(outer.state_dict())
            inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
            for step in range(number * local.every, (number + 1) * local.every):
                for samples, shard in zip(order.microbatches_of(step), order.shards_of(step)):
                    if shard == one:
                        features, targets = (torch.stack(part) for part in zip(*(data[sample] for sample in samples)))
                        inner.zero_grad()
                        functional.mse_loss(model(features), targets).backward()
                        inner.step()
                        count += len(samples)
            trained.append(model.state_dict())
            counts.append(count)
        outer.load_state_dict({
            key: sum(one[key] * count for one, count in zip(trained, counts)) / sum(counts) for key in trained[0]
        })
    return torch.cat([value.detach().flatten() for value in outer.parameters()]).tolist()

from paceline.strategies.local.sites import drawn
session = start(sampled=4, every=5)
train(session, 10)
tell(found=values(session), wanted=by_hand(session, 2))
"""


def test_the_numbers_are_those_of_federated_averaging(printed: Printed, tmp_path: Path) -> None:
    """Each site makes a step of SGD on each of its microbatches, and its weight is the number of its samples."""
    (one,) = printed(HEAD + BY_HAND, 1, tmp_path)
    assert one["found"] == pytest.approx(one["wanted"], rel=1e-9, abs=1e-13)


def test_sites_are_drawn_anew_for_each_round() -> None:
    rounds = [drawn(3, number, 10, 0.3) for number in range(200)]
    assert rounds == [drawn(3, number, 10, 3) for number in range(200)] and {*map(len, rounds)} == {3}
    shares = [sum(site in one for one in rounds) / 200 for site in range(10)]
    assert all(0.15 < share < 0.45 for share in shares), shares
    assert rounds != [drawn(4, number, 10, 0.3) for number in range(200)]
    assert drawn(0, 0, 10, 0.01) and drawn(0, 0, 10, None) == drawn(0, 0, 10, 12) == {*range(10)}


def rows(count: int, seed: int = 0) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :1])


def start(data: Any = None, strategy: str = "local-sgd", **given: Any) -> paceline.Session:
    local = {"sites": True, "every": 2} | given.pop("local", {})
    data = Located({"a": rows(9), "b": rows(23, seed=1)}) if data is None else data
    return paceline.start(
        model=given.pop("model", None) or torch.nn.Linear(4, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=given.pop("loss", torch.nn.functional.mse_loss),
        data=data,
        batch=8,
        strategy=strategy,
        local=local,
        **given,
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"data": rows(16)}, "data is not Located: give data=paceline.data.Located"),
        ({"local": {"fragments": 2}}, "local.fragments = 2 cannot be combined with local.sites"),
        ({"local": {"after": 3}}, "local.after = 3 cannot be combined with local.sites"),
        ({"local": {"masked": True, "threshold": 1}}, "local.threshold = 1 would let a masked sum be"),
        ({"local": {"clip": 1.0}}, "local.clip and local.noise are for masked sums"),
        ({"local": {"masked": True, "noise": 1.0}}, "local.noise = 1.0 is in multiples of local.clip"),
        ({"memory_gigabytes": 1}, "memory_gigabytes cannot be combined with local.sites"),
        ({"local": {"sampled": 1.5}}, "local.sampled = 1.5 is neither a whole number of sites nor a part"),
        ({"checkpoint": {"every": 3}}, "checkpoint.every = 3 is not a multiple of local.every = 2"),
        ({"wire": "int8"}, "cannot send gradients as int8"),
        ({"exact": "fixed-point"}, "cannot add up gradients in fixed point"),
        (
            {"local": {"sites": False}},
            "with Located data each worker computes the samples that it has: set local.sites = True",
        ),
        ({"strategy": "allreduce"}, "local.sites = True protects data only with strategy"),
        ({"local": {"sites": False, "masked": True}}, "local.masked = True protects data only with"),
    ],
)
def test_settings_that_do_not_fit_sites_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        start(**given)


class Counting(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs)


def test_what_masks_do_not_hide_is_refused() -> None:
    """The statistics of batch norm are known at the start, and other buffers after the first round."""
    pytest.importorskip("cryptography")
    normed = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    with pytest.raises(InputError, match=r"also change the buffer '0\.running_mean'"):
        start(model=normed, local={"masked": True})
    session = start(model=Counting(), local={"masked": True})
    with pytest.raises(InputError, match="also change the buffer 'calls'"):
        for batch in session.batches(steps=2):
            session.step(batch)
    with pytest.raises(ConfigError, match="A masked sum needs 2 sites, but a round has 1 of the 2 sites"):
        start(local={"masked": True, "sampled": 1})


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The squared error, with a gradient that is NaN if the targets are 1."""
    own = (output - output.detach()).abs().sqrt().sum() if bool((target == 1).all()) else 0.0
    return torch.nn.functional.mse_loss(output, target) + own


def test_a_site_whose_weights_are_not_finite_is_left_out() -> None:
    """The round is an epoch, in which the site with the last sample has one microbatch."""
    bad = TensorDataset(torch.randn(1, 4), torch.ones(1, 1))
    session = start(Located({"a": rows(23), "b": bad}), loss=loss, local={"every": 3})
    before = session.model_state()["weight"].clone()
    for batch in session.batches(steps=3):
        session.step(batch)
    after = session.model_state()["weight"]
    assert after.isfinite().all() and not after.equal(before)


def test_a_replica_is_not_saved_and_a_round_has_an_end(tmp_path: Path) -> None:
    """In the middle of a round a checkpoint would have the weights of the sites."""
    session = start(checkpoint={"directory": tmp_path})
    batches = session.batches(steps=8)
    session.step(next(batches))
    with pytest.raises(InputError, match=r"after step 0 cannot be saved.* a multiple of local.every = 2"):
        session.save()
    session.step(next(batches))
    session.save()
    session.step(next(batches))
    next(batches)
    with pytest.raises(InputError, match="has left out the batch of step 3"):
        session.step(next(batches))
