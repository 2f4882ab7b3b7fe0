"""What a session reports and how its loops behave."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
import math
import torch
from functools import partial
from torch.nn import functional
import paceline
from subjects import tell

features = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(features, torch.arange(40) % 3)

def start(**settings):
    torch.manual_seed(0)
    return paceline.start(
        model=torch.nn.Linear(4, 3), data=data, loss=functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1), **settings
    )
"""

RATES = """
def rates(**settings):
    session = start(batch_per_worker=4, **settings)
    reports = [session.step(batch) for batch in session.batches(steps=5)]
    rates = [report.learning_rate for report in reports]
    return {"rates": rates, "notes": reports[0].notes, "seen": reports[-1].samples}

halving = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
tell(
    linear=rates(scale_lr="linear", warmup_steps=2),
    sqrt=rates(scale_lr="sqrt"),
    plain=rates(schedule=halving),
    both=rates(schedule=halving, scale_lr="linear"),
)
"""


@pytest.mark.promise("docs/batch-size.md", "With `warmup_steps=w` the rate rises linearly from the script's rate")
def test_the_learning_rate_follows_the_workers_only_when_asked(printed: Printed, tmp_path: Path) -> None:
    for one in printed(HEAD + RATES, 4, tmp_path):
        assert one["linear"]["rates"] == pytest.approx([0.25, 0.4, 0.4, 0.4, 0.4])
        assert one["sqrt"]["rates"] == pytest.approx([0.2] * 5)
        assert one["plain"]["rates"] == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025])
        assert one["both"]["rates"] == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.1])
        assert one["plain"]["seen"] == 40 + 2 * 16
        assert "x 4 (linear): the batch is 4 workers x 4 = 16 samples" in " ".join(one["linear"]["notes"])
        assert "first 2 steps" in " ".join(one["linear"]["notes"])
        assert "x 2 (sqrt)" in " ".join(one["sqrt"]["notes"])
        assert "learning rate" not in " ".join(one["plain"]["notes"])


UNREAD = """
session = start(batch=16, server={"mode": "async", "count": 2})
(batch,) = session.batches(steps=1)
tell(notes=session.step(batch).notes)
"""


def test_settings_without_effect_are_named(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    everyone = ranks(HEAD + UNREAD, 2, tmp_path)
    note = "set, but without effect with strategy allreduce: server.mode, server.count"
    assert [one.code for one in everyone] == [0, 0]
    assert all(note in one.out for one in everyone)
    assert [one.err.count(note) for one in everyone] == [1, 0]


LOOPS = """
session = start(batch=16, exact=True)
assert session.steps_per_epoch == 3
drawn, lasts, epochs = [], [], []
for epoch in range(2):
    for batch in session.batches(epochs=1):
        drawn.append(torch.rand(()).item())
        report = session.step(batch)
        drawn.append(torch.rand(()).item())
        lasts.append(batch.last)
        epochs.append(batch.epoch)
tell(drawn=drawn, lasts=lasts, epochs=epochs, report=[report.step, report.samples, report.applied, report.loss])
tell(timed=report.seconds > 0 and report.samples_per_second > 0, norm=report.gradient_norm)

steps = []
running = session.batches(steps=10)
for batch in running:
    session.step(batch)
    steps.append(batch.step)
    if len(steps) == 2:
        break
for batch in session.batches(steps=2):
    session.step(batch)
    steps.append(batch.step)
tell(steps=steps, position=session.position, workers=session.workers, rank=session.rank)

skipping = start(batch=16, exact=True)
trained = [skipping.step(batch).step for batch in skipping.batches(steps=4) if batch.step != 1]

refused = []
for count in (-1, 1.5, math.nan, True, "3"):
    for what in ("epochs", "steps"):
        try:
            session.batches(**{what: count})
        except paceline.ConfigError as error:
            refused.append(str(error))
tell(trained=trained, refused=refused)

def fail():
    raise LookupError("no such file")

calls = []
made = skipping.once(lambda value: calls.append(value) or {"classes": value}, 3)
try:
    skipping.once(fail)
except (LookupError, paceline.InputError) as error:
    tell(once=[made, len(calls), type(error).__name__, "no such file" in str(error)])
"""


@pytest.mark.promise("docs/train.md", "Let rank 0 do work that must be done only once", "The result goes to all")
@pytest.mark.promise("paceline/session.py", "the function raised (rank 0 raises the error itself)")
def test_loops(printed: Printed, tmp_path: Path) -> None:
    runs = [printed(HEAD + LOOPS, workers, tmp_path) for workers in (1, 3)]
    for run in runs:
        for rank, one in enumerate(run):
            assert one["drawn"] == runs[0][0]["drawn"]
            assert len(set(one["drawn"])) == 12
            assert one["lasts"] == [False, False, True] * 2
            assert one["epochs"] == [0, 0, 0, 1, 1, 1]
            assert one["report"] == [5, 80, True, runs[0][0]["report"][3]]
            assert one["timed"]
            assert math.isfinite(one["norm"])
            assert one["steps"] == [6, 7, 8, 9]
            assert one["position"] == 10
            assert (one["workers"], one["rank"]) == (len(run), rank)
            assert one["trained"] == [0, 2, 3]
            failed = "LookupError" if rank == 0 else "InputError"
            assert one["once"] == [{"classes": 3}, int(rank == 0), failed, True]
            assert len(one["refused"]) == 10
            assert one["refused"][:2] == [
                f"batches({what}=-1): give a whole number from 0 on." for what in ("epochs", "steps")
            ]


RESUMED = """
import sys
resume = "auto" if {again} else None
session = start(batch=16, exact=True, checkpoint=dict(directory="kept", every=2, keep=1), resume=resume)
done = []
for epoch in range(4):
    for batch in session.batches(epochs=1):
        session.step(batch)
        done.append([batch.step, torch.rand(()).item()])
        if not {again} and batch.step == 6:
            sys.exit()
tell(done=done, fingerprint=session.fingerprint())
"""

WHOLE = """
session = start(batch=16, exact=True)
done = []
for batch in session.batches(epochs=4):
    session.step(batch)
    done.append([batch.step, torch.rand(()).item()])
tell(done=done, fingerprint=session.fingerprint())
"""


def test_a_resumed_loop_over_epochs_goes_on_where_it_was(printed: Printed, ranks: Any, tmp_path: Path) -> None:
    (whole,) = printed(HEAD + WHOLE, 1, tmp_path)
    kept = str(tmp_path / "kept")
    first, second = ((HEAD + RESUMED.format(again=again)).replace('"kept"', repr(kept)) for again in (False, True))
    ranks(first, 3, tmp_path)
    assert sorted(path.name for path in Path(kept).glob("step-*")) == ["step-000006"]
    for one in printed(second, 2, tmp_path):
        assert one["done"] == whole["done"][5:]  # what follows the last step of the checkpoint had not run
        assert one["fingerprint"] == whole["fingerprint"]


TOKENS = """
text = [torch.randint(5, (length,), generator=torch.Generator().manual_seed(length)) for length in range(1, 41)]

def padded(items):
    longest = max(map(len, items))
    return torch.stack([torch.nn.functional.pad(item, (0, longest - len(item)), value=-1) for item in items])

def forward(model, tokens):
    given = tokens >= 0
    losses = functional.cross_entropy(model(tokens.clamp(min=0)).transpose(1, 2), tokens.clamp(min=0), reduction="none")
    return (losses * given).sum(), given.sum()

def model():
    torch.manual_seed(0)
    return torch.nn.Embedding(5, 5).double()

whole = model()
total, count = forward(whole, padded(text))
(total / count).backward()
session = paceline.start(
    model=model(), data=text, forward=forward, collate=padded, batch=40, optimizer=partial(torch.optim.SGD, lr=1.0)
)
(report,) = [session.step(batch) for batch in session.batches(epochs=1)]
moved = (model().weight - session._context.compute.model.weight).flatten().tolist()
tell(loss=[report.loss, (total / count).item()], moved=moved, gradient=whole.weight.grad.flatten().tolist())
tell(evaluated=session.evaluate(text, lambda model, tokens: (0.0, 1.0)))
"""


def test_a_mean_over_tokens_is_the_mean_over_all_tokens_of_the_batch(printed: Printed, tmp_path: Path) -> None:
    for one in printed(HEAD + TOKENS, 3, tmp_path):
        assert one["loss"][0] == pytest.approx(one["loss"][1], rel=1e-12)
        assert one["moved"] == pytest.approx(one["gradient"], rel=1e-9, abs=1e-15)
        assert one["evaluated"] == 0.0
