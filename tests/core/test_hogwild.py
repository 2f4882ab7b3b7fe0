"""Hogwild: plain SGD where one process computes all, and each step exactly once where several do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_counts import STEPS, expected, updates_in
from test_parameter_server import ALL_COMPUTE

Printed = Callable[..., list[dict[str, Any]]]
Run = Callable[..., Any]

SUBJECT = """
import os
from functools import partial
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
import paceline
from paceline.checkpoint.tensors import fingerprint, named_tensors
from paceline.data.order import Order
from subjects import tell

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.EmbeddingBag(200, 8, mode="sum", sparse=True)
        self.output = nn.Linear(8, 3)

    def forward(self, words):
        return self.output(self.rows(words))

def model():
    torch.manual_seed(0)
    return Bag()

random = torch.Generator().manual_seed(1)
words = torch.randint(200, (128, 5), generator=random)
data = TensorDataset(words, words.sum(1) % 3)
kind = getattr(torch.optim, os.environ["OPTIMIZER"])
optimizer = partial(kind, lr=0.5)
"""

HERE = (
    SUBJECT
    + """
import time
from paceline.strategies.parameter_server.async_steps import AsyncSteps
arrive = AsyncSteps._enter
def arrive_late(strategy, step):  # when the other worker has taken the step
    while strategy._claims.read().top <= step:
        time.sleep(0.001)
    return arrive(strategy, step)
if os.environ.get("RANK", "0") != "0":
    AsyncSteps._enter = arrive_late
bag = model()
held = list(bag.parameters())
session = paceline.start(
    model=bag, optimizer=optimizer, loss=functional.cross_entropy, data=data, batch=32,
    microbatches=int(os.environ["PARTS"]),
    strategy="hogwild", timeout_seconds=30,
)
for batch in session.batches(epochs=3):
    session.step(batch)
assert [id(value) for value in held] == [id(value) for value in bag.parameters()]
tell(fingerprint=session.fingerprint(), workers=session.workers)
"""
)

PLAIN = (
    SUBJECT
    + """
bag = model()
steps = optimizer(bag.parameters())
order = Order(128, 32, 1, seed=0)
for step in range(12):
    (samples,) = order.microbatches_of(step)
    features, target = data[samples]
    steps.zero_grad()
    functional.cross_entropy(bag(features), target).backward()
    steps.step()
tell(fingerprint=fingerprint(named_tensors(bag, steps)))
"""
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_where_one_process_computes_all_it_is_the_plain_optimizer(
    printed: Printed, tmp_path: Path, optimizer: str
) -> None:
    (plain,) = printed(PLAIN, 1, tmp_path / "plain", environment={"OPTIMIZER": optimizer})
    (alone,) = printed(HERE, 1, tmp_path / "alone", environment={"OPTIMIZER": optimizer, "PARTS": "1"})
    assert alone["fingerprint"] == plain["fingerprint"]
    (parts,) = printed(HERE, 1, tmp_path / "parts", environment={"OPTIMIZER": optimizer, "PARTS": "2"})
    for one in printed(HERE, 2, tmp_path / "two", environment={"OPTIMIZER": optimizer, "PARTS": "2"}):
        assert one == parts | {"workers": 2}


OPTIMIZERS = {
    "AdamW": ["AdamW cannot make the update", "'rows.weight' has a sparse gradient", "SGD and Adagrad"],
    "SparseAdam": ["SparseAdam cannot make the update", "does not support dense gradients", "SGD and Adagrad"],
    "Momentum": ["Momentum keeps a sparse 'momentum_buffer'", "'rows.weight'", "Adagrad"],
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_that_does_not_take_sparse_gradients_is_refused_in_the_first_step(
    ranks: Run, tmp_path: Path, optimizer: str
) -> None:
    momentum = """
class Momentum(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr, momentum=0.9)
torch.optim.Momentum = Momentum
kind ="""
    script = HERE.replace("kind =", momentum).replace(
        "session.step(batch)", "session.step(batch)\n    print('went on')"
    )
    everyone = ranks(script, 2, tmp_path, environment={"OPTIMIZER": optimizer, "PARTS": "2"})
    assert sorted(one.code for one in everyone) in ([2, 2], [2, 5])
    for one in everyone:
        assert "went on" not in one.out and "Traceback" not in one.err
        assert one.code == 5 or all(word in one.err for word in OPTIMIZERS[optimizer]), one.err


COUNTED = """
import sample_counts, os
from subjects import tell
data, model = sample_counts.rows(), sample_counts.table()
session = sample_counts.start(strategy="hogwild", data=data, model=model, forward=sample_counts.picked)
values = []
for batch in session.batches(epochs=2):
    session.step(batch)
    if session.position == 5:
        values.append(session.evaluate(sample_counts.rows()))
shared = any(value.untyped_storage().filename for value in session._context.compute.model.parameters())
tell(fingerprint=session.fingerprint(), values=values, weights=session._context.compute.model.weight[:, 0].tolist())
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("slow", ["0.02,0.02,0.02", "0.004,0"])
def test_each_row_is_updated_as_often_as_its_sample_is_used(printed: Printed, tmp_path: Path, slow: str) -> None:
    """No two samples have a row in common, so nothing is lost although nothing is locked."""
    everyone = printed(ALL_COMPUTE + COUNTED, 3, tmp_path, environment={"SLOW": slow, "PACELINE_RUN": str(tmp_path)})
    assert len({json.dumps(one) for one in everyone}) == 1
    assert set(everyone[0]["weights"]) == {-2 * 2.0**-10}
    updates = updates_in(tmp_path)
    assert sorted(one["step"] for one in updates) == list(range(2 * STEPS))
    assert sorted(one["version"] for one in updates) == list(range(1, 2 * STEPS + 1))
    assert len({one["rank"] for one in updates}) > 1


UPDATED_MEANWHILE = (
    SUBJECT
    + """
import time
from paceline.strategies.parameter_server.async_steps import AsyncSteps
from paceline.step.gradients.fusion import Fusion
rank = int(os.environ["RANK"])
arrive, obstacle = AsyncSteps._enter, Fusion._obstacle
def arrive_late(strategy, step):  # so that rank 1 takes step 1
    while step == 1 - rank and strategy._claims.read().top <= step:
        time.sleep(0.001)
    return arrive(strategy, step)
def find_out_late(fusion, groups, pairs):  # when the other worker has changed the weights
    strategy = session._loop.strategy
    while rank and strategy._claims.read().version <= 1:
        time.sleep(0.001)
    return obstacle(fusion, groups, pairs)
AsyncSteps._enter, Fusion._obstacle = arrive_late, find_out_late
session = paceline.start(
    model=model(), optimizer=optimizer, loss=functional.cross_entropy, data=data, batch=32, strategy="hogwild",
    timeout_seconds=30,
)
for batch in session.batches(epochs=3):
    session.step(batch)
context = session._context
tell(parts=context.order.microbatches, fusible=context.probe_results.fusible, fingerprint=session.fingerprint())
"""
)


def test_microbatches_are_fused_in_spite_of_updates_of_others(printed: Printed, tmp_path: Path) -> None:
    everyone = printed(UPDATED_MEANWHILE, 2, tmp_path, environment={"OPTIMIZER": "SGD"})
    assert everyone[0] == everyone[1]
    assert everyone[0]["parts"] > 1 and everyone[0]["fusible"] is True


SCHEDULED = """
import sample_counts
from subjects import tell
from torch.optim.lr_scheduler import LambdaLR
session = sample_counts.start(strategy="hogwild", schedule=lambda one: LambdaLR(one, lambda update: 1 / (1 + update)))
for batch in session.batches(epochs=2):
    report = session.step(batch)
rate = session._context.update.learning_rate
tell(rate=rate, fingerprint=session.fingerprint())
"""


def test_the_schedule_counts_the_updates_of_all(printed: Printed, tmp_path: Path) -> None:
    everyone = printed(SCHEDULED, 2, tmp_path, environment={"PACELINE_RUN": str(tmp_path)})
    assert [one["rate"] for one in everyone] == [2.0**-6 / (1 + 2 * STEPS)] * 2
    for one in updates_in(tmp_path):
        assert one["learning_rate"] <= 2.0**-6 / (1 + one["pulled"])
        assert one["learning_rate"] >= 2.0**-6 / (1 + one["version"])


FOLLOWED = """
import sample_counts, json, os
from subjects import tell
layers = sample_counts.model()
first = sample_counts.start(model=layers, **json.loads(os.environ["FIRST"]))
for batch in first.batches(epochs=1):
    if batch.step == 5:
        break
    first.step(batch)
second = sample_counts.start(model=layers)
before = sample_counts.weights(second)
for batch in second.batches(epochs=1):
    second.step(batch)
tell(before=before, change=[after - value for after, value in zip(sample_counts.weights(second), before)])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [{"strategy": "hogwild"}, {"strategy": "parameter-server", "server": {"mode": "async", "dedicated": True}}],
    ids=["hogwild", "dedicated"],
)
def test_a_session_after_one_that_was_left_early_has_weights_of_its_own(
    printed: Printed, tmp_path: Path, first: dict[str, Any]
) -> None:
    environment = {"FIRST": json.dumps(first), "SLOW": "0,0.004"}
    everyone = printed(FOLLOWED, 3, tmp_path, environment=environment)
    assert len({json.dumps(one) for one in everyone}) == 1
    assert everyone[0]["change"] == expected(1)


SKIPPED = """
import sample_counts, torch
from subjects import tell
from torch.utils.data import TensorDataset
values = sample_counts.inputs()
values[17] = float("nan")
session = sample_counts.start(strategy="hogwild", data=TensorDataset(values), nonfinite="skip")
for batch in session.batches(epochs=1):
    session.step(batch)
tell(finite=all(weight == weight for weight in sample_counts.weights(session)), position=session.position)
"""


def test_a_step_that_is_not_finite_is_left_out(printed: Printed, tmp_path: Path) -> None:
    everyone = printed(SKIPPED, 2, tmp_path, environment={"PACELINE_RUN": str(tmp_path)})
    assert everyone == [{"finite": True, "position": STEPS}] * 2
    assert len(updates_in(tmp_path)) == STEPS - 1
    assert len(updates_in(tmp_path, "skipped")) == 1


def test_workers_on_several_machines_are_refused(ranks: Run, tmp_path: Path) -> None:
    script = "import sample_counts\nsample_counts.start(strategy='hogwild')"
    for one in ranks(script, 2, tmp_path, one_machine=False):
        assert one.code == 2
        assert "'hogwild' is for one machine" in one.err
        assert "several (1 of 2 workers are on this one): use 'parameter-server'" in one.err


RESUMED = """
import sample_counts, os
from subjects import tell
session = sample_counts.start(
    strategy="hogwild", checkpoint={"directory": os.environ["SAVED"], "every": 3}, resume="auto",
    optimizer=sample_counts.momentum,
)
start = session.position
for batch in session.batches(steps=int(os.environ["STOP"])):
    session.step(batch)
tell(start=start, position=session.position, weights=sample_counts.weights(session))
"""


def test_it_goes_on_from_a_checkpoint(printed: Printed, tmp_path: Path) -> None:
    saved = {"SAVED": str(tmp_path / "saved")}
    printed(RESUMED, 2, tmp_path / "first", environment=saved | {"STOP": "8"})
    again = printed(RESUMED, 3, tmp_path / "second", environment=saved | {"STOP": "16"})
    assert [one["start"] for one in again] == [6] * 3
    assert len({json.dumps(one) for one in again}) == 1


def test_the_weights_count_the_samples() -> None:
    """What other tests rely on."""
    assert expected(1.0) != expected(1.0 + 1 / 128)
