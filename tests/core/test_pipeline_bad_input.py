"""A model that cannot be cut as asked is refused by all workers; what goes wrong on the way ends them all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_bad_input import Bad, Printed, check_refusal, message, refusals

from paceline.testing.ranks import Ended

Run = Callable[..., list[Ended]]

HEAD = """
import os, sys, time, signal
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
import paceline
from subjects import classes
from pipeline_cases import CUT, Skips

RANK = int(os.environ["RANK"])
given = CUT["batch norm"]() | {"strategy": "pipeline", "timeout_seconds": 20}

def go(steps=4, **changes):
    session = paceline.start(**(given | changes))
    for batch in session.batches(steps=steps):
        session.step(batch)
    print("done", flush=True)

def layers(*middle):
    return nn.Sequential(nn.Linear(12, 12), *middle, nn.Linear(12, 4))

def small(model, **changes):
    go(**({"model": model, "data": classes(96)} | changes))
"""
TEN = "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
REFUSED = {
    "more stages than layers": Bad(
        "small(layers())", "ConfigError", ["3 stages", "has 2: 0, 1", "pipeline.stages"], workers=3
    ),
    "more stages than layers, cut": Bad(
        "small(layers(), pipeline={'cut': ['1', '2']})", "ConfigError", ["3 stages", "has 2: 0, 1"], workers=3
    ),
    "a layer that returns no tensor": Bad(
        "class Length(nn.Module):\n    def forward(self, values): return len(values)\n"
        "class Back(nn.Module):\n    def forward(self, values): return torch.ones(values, 12)\n"
        "small(layers(Length(), Back()))",
        "InputError",
        ["'1' (Length)", "no tensor but int"],
    ),
    "a loss that reads what a layer keeps": Bad(
        "class Keeps(nn.Linear):\n    def forward(self, values):\n"
        "        out = super().forward(values)\n"
        "        self.last, self.penalty = out.detach(), out.pow(2).mean()\n        return out\n"
        "model = layers(Keeps(12, 12), nn.Tanh())\n"
        "small(model, loss=lambda out, target: functional.cross_entropy(out, target) + model[1].penalty)",
        "InputError",
        ["The loss reads model.1.penalty", "would read an old value", "Let the model return it"],
    ),
    "a loss that counts its calls": Bad(
        "calls = []\n"
        "def loss(out, target):\n    calls.append(0); return functional.cross_entropy(out, target) / len(calls)\n"
        "small(layers(nn.Tanh()), loss=loss, exact=True)",
        "InputError",
        ["The same microbatch computed twice gives different results"],
    ),
    "a loss that reads a buffer": Bad(
        "class Heats(nn.Linear):\n    def forward(self, values):\n"
        "        out = super().forward(values); self.heat.add_(out.detach().abs().mean()); return out\n"
        "hot = Heats(12, 12); hot.register_buffer('heat', torch.ones(()))\n"
        "small(layers(hot), loss=lambda out, target: functional.cross_entropy(out, target) / hot.heat)",
        "InputError",
        ["The loss reads the buffer '1.heat'"],
    ),
    "a layer that uses what another one keeps": Bad(
        "class Keeps(nn.Linear):\n    def forward(self, values):\n"
        "        self.kept = super().forward(values)\n        return self.kept\n"
        "class Adds(nn.Module):\n    def forward(self, values): return values + model[1].kept\n"
        "model = layers(Keeps(12, 12), nn.Tanh(), Adds())\n"
        "small(model)",
        "InputError",
        ["trains in one piece, but not layer by layer", "A layer may use a value or weight of another layer"],
    ),
    "an unknown layer": Bad("go(pipeline={'cut': ['5b']})", "ConfigError", ["'5b'", "closest: '5'", TEN]),
    "layers in the wrong order": Bad(
        "go(pipeline={'cut': ['5', '2']})", "ConfigError", ["Stage 2", "'2' is not after '5'"], workers=3
    ),
    "a cut at the first layer": Bad("go(pipeline={'cut': ['0']})", "ConfigError", ["Stage 1", "'0' is not after '0'"]),
    "another number in the cut": Bad(
        "go(pipeline={'cut': ['2', '5'], 'stages': 2})", "ConfigError", ["pipeline.stages (2)", "pipeline.cut", "(3)"]
    ),
    "stages that the workers cannot hold": Bad(
        "go(pipeline={'stages': 2, 'schedule': 'zb-h1'})",
        "ConfigError",
        ["3 workers", "2 stages", "multiple of 2"],
        workers=3,
    ),
    "more stages than workers": Bad("go(pipeline={'stages': 3})", "ConfigError", ["2 workers", "3 stages"]),
    "replicas of other workers": Bad(
        "go(pipeline={'replicas': [1, 2]})", "ConfigError", ["[1, 2]", "3 workers", "there are 2"]
    ),
    "no replica of a stage": Bad("go(pipeline={'replicas': [0, 2]})", "ConfigError", ["pipeline.replicas", "0"]),
    "uneven replicas of a zero bubble": Bad(
        "go(pipeline={'replicas': [1, 2], 'schedule': 'zb-h1'})", "ConfigError", ["[1, 2]", "'zb-h1'"], workers=3
    ),
    "microbatches that replicas do not share evenly": Bad(
        "go(pipeline={'stages': 1, 'schedule': 'pipedream'}, microbatches=2)",
        "ConfigError",
        ["[3]", "2 microbatches", "microbatches to a multiple of 3"],
        workers=3,
    ),
    "too few microbatches for PipeDream-2BW": Bad(
        "go(pipeline={'schedule': '2bw'}, microbatches=2)",
        "ConfigError",
        ["3 workers", "not 2", "pipeline.update_every, by default the number of microbatches in a batch"],
        workers=3,
    ),
    "an unknown schedule": Bad("go(pipeline={'schedule': 'zb'})", "ConfigError", ["pipeline.schedule = 'zb'", "zb-h1"]),
    "a forward pass that uses a layer": Bad(
        "del given['loss']\ngo(forward=lambda model, data: functional.cross_entropy(model[0](data[0]), data[1]))",
        "InputError",
        ["uses '__getitem__' of the model", "is called once for each microbatch, with one value"],
    ),
    "a state from batch to batch": Bad(
        "del given['loss']\ngo(data=classes(96), forward=lambda model, data, state: (model(data[0]).mean(), state))",
        "ConfigError",
        ["a state from batch to batch", "'pipeline' cannot carry"],
    ),
    "compiling": Bad("go(compile=True)", "ConfigError", ["compile=True", "'pipeline'"]),
    "a loss that uses weights": Bad(
        "model = layers(nn.Linear(12, 12))\n"
        "small(model, loss=lambda output, target: functional.cross_entropy(output, target) + model[0].weight.norm())",
        "InputError",
        ["parameter '0.weight'", "weight_decay"],
    ),
    "a loss that uses frozen weights": Bad(
        "model = layers(nn.Linear(12, 12).requires_grad_(False))\n"
        "small(model, loss=lambda output, target: functional.cross_entropy(output + model[1].bias.mean(), target))",
        "InputError",
        ["parameter '1.bias'", "another strategy"],
    ),
    "a backward hook on the model itself": Bad(
        "given['model'] = Skips()\n"
        "given['model'].register_full_backward_hook(lambda module, given, made: (2 * given[0],))\n"
        "go(data=classes(96), loss=functional.cross_entropy)",
        "InputError",
        ["'Skips' has a backward hook", "a layer of it"],
    ),
    "a hook on the sequence itself": Bad(
        "model = layers(nn.Tanh(), nn.Linear(12, 12))\n"
        "model.register_forward_hook(lambda module, given, made: made + made.detach())\n"
        "small(model)",
        "InputError",
        ["trains otherwise when it is cut", "the loss is"],
    ),
    "a hook that counts": Bad(
        "model, past = layers(nn.Tanh(), nn.Linear(12, 12)), {'calls': 0}\n"
        "def hook(module, given, made):\n"
        "    past['calls'] += 1\n"
        "    return made * past['calls']\n"
        "model[0].register_forward_hook(hook)\n"
        "small(model)",
        "InputError",
        ["The same microbatch computed twice gives different results: the loss differs: it changes past['calls']."],
    ),
    "classes to recompute": Bad(
        "go(recompute=['Conv2d'])", "ConfigError", ["recompute = ['Conv2d']", "pipeline.recompute = true"]
    ),
    "exact bits with PipeDream": Bad(
        "go(pipeline={'schedule': 'pipedream'}, exact=True)", "ConfigError", ["'pipeline'", "exact=True"]
    ),
    "too few microbatches between updates": Bad(
        "go(pipeline={'schedule': '2bw', 'update_every': 2})", "ConfigError", ["3 workers", "not 2"], workers=3
    ),
    "too little memory": Bad(
        "go(memory_gigabytes=1e-6)", "ConfigError", ["does not fit into 2 stages", "stage", "1,000"]
    ),
    "too little memory for a cut": Bad(
        "go(memory_gigabytes=2e-6, pipeline={'cut': ['9']})", "ConfigError", ["Stage 0", "'0' to '8'", "2,000"]
    ),
    "tied weights in a stage of two workers": Bad(
        "go(**CUT['tied weights'](), pipeline={'schedule': 'pipedream', 'replicas': [2, 1]})",
        "ConfigError",
        ["'embedding.weight'", "stages 0, 1", "2 workers", "'1f1b'"],
        workers=3,
    ),
    "a buffer that two stages change": Bad(
        "norm = nn.BatchNorm1d(12)\nsmall(layers(norm, nn.Tanh(), norm), pipeline={'cut': ['2']})",
        "InputError",
        ["Stages 0 and 1", "both change the buffer '1.", "pipeline.cut"],
    ),
}


@pytest.fixture(scope="module")
def refused(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return refusals(printed, HEAD, REFUSED, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_training(refused: dict[str, list[Any]], case: str) -> None:
    check_refusal(refused[case], REFUSED[case])


@pytest.mark.parametrize(
    ("keeps", "reads", "name"),
    [
        ("self.last = out.pow(2).mean()", "+ hot.last", "model.1.last"),
        ("self.last = float(out.mean())", "* hot.last", "model.1.last"),
        ("self.heat.add_(out.detach().mean())", "* hot.heat", "the buffer '1.heat'"),
    ],
    ids=["a tensor", "a number", "a buffer"],
)
def test_a_loss_that_reads_what_a_layer_keeps_in_a_later_step(
    ranks: Run, tmp_path: Path, keeps: str, reads: str, name: str
) -> None:
    body = f"""
class Heats(nn.Linear):
    def forward(self, values):
        out = super().forward(values); {keeps}; return out
hot, late = Heats(12, 12), [False]
hot.last = 0.0
hot.register_buffer("heat", torch.ones(()))
def loss(out, target):
    value = functional.cross_entropy(out, target)
    return value {reads} if late[0] else value
session = paceline.start(**given | dict(model=layers(hot), data=classes(96), loss=loss, pipeline={{"cut": ["2"]}}))
for batch in session.batches(steps=12):
    late[0] = batch.step >= 3
    session.step(batch)
print("done", flush=True)
"""
    last = ranks(HEAD + body, 2, tmp_path, deadline=60)[1]
    assert f"Audit of step 3: The loss reads {name}, which the forward pass" in message(last, "InputError")
    assert last.code == 2 and "done" not in last.out


@pytest.mark.slow
def test_one_worker_alone_cuts_nothing(ranks: Run, tmp_path: Path) -> None:
    (alone,) = ranks(HEAD + "go(pipeline={'stages': 4, 'cut': ['nowhere']})", 1, tmp_path)
    assert (alone.code, alone.out) == (0, "done\n"), alone.err


def check_ended(ended: list[Ended], error: str, words: list[str]) -> None:
    """Nobody comes to the end; those that failed by themselves say why, the others who is gone."""
    said = [one.err for one in ended if f": {error}: " in one.err]
    assert said and all(word in text for text in said for word in words), [one.err for one in ended]
    for one in ended:
        assert one.code != 0 and "done" not in one.out
        if f": {error}: " not in one.err:
            assert re.search("rank", message(one, "WorkerLost"))


def test_samples_of_other_lengths(ranks: Run, tmp_path: Path) -> None:
    """As many samples in each microbatch, but the second batch has longer ones."""
    body = """
class Lengths(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, place): return place

def collate(places):
    length = 3 if len(seen) < 8 else 5
    seen.append(places)
    return torch.ones(len(places), length, 12), torch.zeros(len(places), dtype=torch.long)

class Mean(nn.Module):
    def forward(self, values): return values.mean(1)

seen = []
small(layers(nn.Tanh(), Mean()), data=Lengths(), collate=collate, pipeline={"cut": ["1"]}, timeout_seconds=10)
"""
    ended = ranks(HEAD + body, 2, tmp_path, deadline=60)
    check_ended(ended, "InputError", ["output of stage 0", "4 samples", "[4, 3, 12]", "[4, 5, 12]", "pad"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream"])
def test_a_loss_that_is_not_a_number(ranks: Run, tmp_path: Path, schedule: str) -> None:
    body = f"""
calls = []
def loss(output, target):
    calls.append(1)
    return functional.cross_entropy(output, target) * (float("nan") if len(calls) == 12 else 1)
go(loss=loss, pipeline={{"schedule": {schedule!r}, "cut": ["2", "6"]}}, steps=8)
"""
    # with PipeDream the batch of an update is that of a step
    ended = ranks(HEAD + body, 3, tmp_path, deadline=60)
    check_ended(ended, "NonFiniteLoss", ["nan", "step 1", "nonfinite='skip'"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("shift", "loss", "words"),
    [
        ("calls[0] == 40", "outputs.tanh().mean()", "forward does not repeat: the output of microbatch"),
        ("0", "outputs.mean() * model[2].weight.norm()", "loss over the whole batch uses the parameter '2.weight'"),
        ("0", "outputs.mean() * model[2].norm.running_mean.sum()", "uses the buffer '2.norm.running_mean'"),
        ("0", "outputs.detach().mean()", "batch_loss returned a loss that needs no gradient"),
    ],
)
def test_a_loss_over_the_whole_batch(ranks: Run, tmp_path: Path, shift: str, loss: str, words: str) -> None:
    body = f"""
class Normed(nn.Linear):
    def __init__(self):
        super().__init__(12, 12)
        self.norm = nn.BatchNorm1d(12)
    def forward(self, values):
        return self.norm(super().forward(values))
del given["loss"]
calls, model = [0], layers(Normed(), Normed())
def forward(model, data):
    calls[0] += 1
    return model(data[0]).roll(int({shift}), 0)
small(model, forward=forward, batch_loss=lambda outputs, batch: {loss})
"""
    check_ended(ranks(HEAD + body, 2, tmp_path, deadline=60), "InputError", [words])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_parameter_that_is_used_sometimes(ranks: Run, tmp_path: Path, schedule: str) -> None:
    body = f"""
class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(12, 12), 0
    def forward(self, values):
        self.calls += 1
        return self.layer(values) if self.calls < 6 else values
small(layers(Sometimes(), nn.Tanh()), pipeline={{"schedule": {schedule!r}, "cut": CUT_AT}}, data=classes(64))
"""
    at = "['1', '2', '3']" if schedule == "zb-v" else "['1']"
    ended = ranks(HEAD + body.replace("CUT_AT", at), 2, tmp_path, deadline=60)
    check_ended(ended, "InputError", ["'1.layer.weight'", "microbatch", "missing_gradient='zero'"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("exact", [False, True])
def test_a_tied_weight_that_is_used_sometimes(ranks: Run, tmp_path: Path, exact: bool) -> None:
    body = f"""
from paceline.data.order import Order
class Sometimes(nn.Linear):
    def forward(self, values):
        return values if values.max() > 100 and LEFT_OUT else super().forward(values)
model = layers(Sometimes(12, 12, bias=False), nn.ReLU(), Sometimes(12, 12, bias=False))
model[3].weight = model[1].weight
data = classes(64)
data.tensors[0][Order(64, 32, 8, seed=0).microbatches_of(0)[4][0]] *= 10_000
small(model, pipeline={{"cut": ["2"]}}, data=data, exact={exact})
"""
    ended = ranks(HEAD + body.replace("LEFT_OUT", "True"), 2, tmp_path / "both", deadline=60)
    check_ended(ended, "InputError", ["'1.weight'", "microbatch 4", "missing_gradient='zero'"])
    ended = ranks(HEAD + body.replace("LEFT_OUT", "self is model[1]"), 2, tmp_path / "one", deadline=60)
    assert [one.code for one in ended] == [0, 0], [one.err for one in ended]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_buffer_that_two_stages_change(ranks: Run, tmp_path: Path, schedule: str) -> None:
    """It is known after the first step only: batch norms are known before."""
    body = f"""
class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, values):
        self.seen += values.detach().mean()
        return values

count = Count()
small(layers(count, nn.Tanh(), count), pipeline={{"schedule": {schedule!r}, "cut": ["2"]}})
"""
    ended = ranks(HEAD + body, 2, tmp_path, deadline=60)
    check_ended(ended, "InputError", ["Stages 0 and 1", "'1.seen'", "pipeline.cut"])


CAST = """
model = layers(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
model[3].weight = model[1].weight
small(model, autocast="bfloat16", exact=EXACT, pipeline={"cut": ["2"]})
"""
OUTPUT = """
class Weight(nn.Linear):
    def forward(self, values): return super().forward(values), self.weight

class Both(nn.Linear):
    def forward(self, given): return super().forward(given[0]) @ given[1]

model = layers(Weight(12, 12), Both(12, 12))
model[2].weight = model[1].weight
small(model, exact=EXACT, pipeline={"cut": ["2"]})
"""
HOOK = """
model = layers(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
model[3].weight = model[1].weight
model[1].weight.HOOK
small(model, exact=EXACT, pipeline={"cut": ["2"]})
"""
CLAMP = HOOK.replace("HOOK", "register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))")
CLAMP_LATER = HOOK.replace("HOOK", "register_post_accumulate_grad_hook(lambda one: print(one.grad.clamp_(-0.1, 0.1)))")
REENTRANT = """
from torch.utils.checkpoint import checkpoint

class Again(nn.Sequential):
    def forward(self, values): return checkpoint(super().forward, values, use_reentrant=True)

model = layers(nn.Linear(12, 12), nn.Tanh(), Again(nn.Linear(12, 12)), nn.Tanh(), nn.Linear(12, 12))
model[3][0].weight = model[5].weight = model[1].weight
small(model, exact=EXACT, pipeline={"cut": ["CUT"]})
"""
APART = {
    "cast": (CAST, "cast by autocast"),
    "value": (OUTPUT, "is an output of the stage"),
    "hook": (CLAMP, "has a hook"),
    "hook of the sum": (CLAMP_LATER, "has a hook"),
    "reentrant, first stage": (REENTRANT.replace("CUT", "4"), "stage 0 that is not the sum"),
    "reentrant, last stage": (REENTRANT.replace("CUT", "3"), "use_reentrant=False"),
    "reentrant, alone in the last stage": (
        REENTRANT.replace("nn.Linear(12, 12))\nmodel", "nn.Tanh())\nmodel")
        .replace("model[5].weight = ", "")
        .replace("CUT", "3"),
        "stage 1 that is not the sum",
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("body", "why"), APART.values(), ids=APART)
def test_uses_of_a_weight_that_cannot_be_told_apart(ranks: Run, tmp_path: Path, body: str, why: str) -> None:
    ended = ranks(HEAD + body.replace("EXACT", "True"), 2, tmp_path, deadline=60)
    check_ended(ended, "InputError", ["exact=True", "'1.weight'", why, "pipeline.cut"])
    ended = ranks(HEAD + body.replace("EXACT", "False"), 2, tmp_path, deadline=60)
    assert [one.code for one in ended] == [0, 0]


SPARSE = """
class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(4, 12))
    def forward(self, values): return values, self.rows * 1

class Look(nn.Module):
    def forward(self, given):
        values, rows = given
        return values + functional.embedding((values[:, 0] > 0).long(), rows, sparse=True)

class Rows(Table):
    def forward(self, values): return Look()((values, self.rows))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream", "2bw"])
def test_sparse_gradients(ranks: Run, tmp_path: Path, schedule: str) -> None:
    body = f"small(layers(Rows()), pipeline={{'cut': ['1'], 'schedule': {schedule!r}}})"
    ended = ranks(HEAD + SPARSE + body, 2, tmp_path / "own", deadline=60)
    check_ended(ended, "InputError", ["The parameter '1.rows' gets sparse gradients", "sparse=False"])
    body = f"small(layers(Table(), Look()), pipeline={{'cut': ['2'], 'schedule': {schedule!r}}})"
    ended = ranks(HEAD + SPARSE + body, 2, tmp_path / "value", deadline=60)
    check_ended(ended, "InputError", ["The output of stage 0 gets sparse gradients", "sparse=False"])


def test_an_update_that_counts_nothing(ranks: Run, tmp_path: Path) -> None:
    body = """
calls = []
def loss(output, target):
    if output.requires_grad:
        calls.append(1)
    counts = len(calls) != 9  # a call in training: the trials before make fewer
    return functional.cross_entropy(output, target, reduction="sum") * counts, len(target) * counts
small(layers(nn.Tanh()), loss=loss, pipeline={"schedule": "pipedream", "update_every": 1, "cut": ["1"]})
"""
    ended = ranks(HEAD + body, 2, tmp_path, deadline=60)
    check_ended(ended, "InputError", ["count 0", "pipeline.update_every"])


def test_an_optimizer_that_draws_random_numbers(ranks: Run, tmp_path: Path) -> None:
    body = """
class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for value in (value for group in self.param_groups for value in group["params"] if value.grad is not None):
            value.grad.add_(torch.randn_like(value), alpha=0.01)
        return super().step(closure)
small(layers(nn.Tanh()), optimizer=lambda parameters: Noisy(parameters, lr=0.1), exact=EXACT, pipeline={"cut": ["1"]})
"""
    ended = ranks(HEAD + body.replace("EXACT", "True"), 2, tmp_path, deadline=60)
    check_ended(ended, "InputError", ["Noisy draws random numbers", "exact=True"])
    ended = ranks(HEAD + body.replace("EXACT", "False"), 2, tmp_path, deadline=60)
    assert [one.code for one in ended] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_state_that_cannot_be_given_to_others(ranks: Run, tmp_path: Path, schedule: str) -> None:
    """Else it would be lost whenever the workers bring the model together."""
    body = f"""
class Listing(torch.optim.SGD):
    def step(self, closure=None):
        for value in (value for group in self.param_groups for value in group["params"] if value.grad is not None):
            self.state[value].setdefault("norms", []).append(value.norm())
        return super().step(closure)
small(layers(nn.Tanh()), optimizer=lambda parameters: Listing(parameters, lr=0.1),
      pipeline={{"cut": ["1"], "schedule": {schedule!r}}})
"""
    ended = ranks(HEAD + body, 2, tmp_path, deadline=60)
    for one in ended:
        assert one.code == 4
        assert "'norms' is a list" in message(one, "CheckpointError")


ACCIDENT = """
class Fatal(nn.Module):
    calls = 0
    def forward(self, values):
        Fatal.calls += 1
        if RANK == 1 and Fatal.calls == 21:
            ACCIDENT
        return values
model = layers(nn.Tanh(), Fatal(), nn.Linear(12, 12), nn.Tanh())
small(model, steps=9, pipeline={"schedule": "SCHEDULE", "cut": ["1", "4"]}, timeout_seconds=SECONDS)
"""


def script_of(accident: str, schedule: str, seconds: int) -> str:
    return HEAD + ACCIDENT.replace("ACCIDENT", accident).replace("SCHEDULE", schedule).replace("SECONDS", str(seconds))


@pytest.mark.sampled(1)
@pytest.mark.crossed
@pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("accident", ["os.kill(os.getpid(), 9)", "raise OSError('boom')"], ids=["killed", "raises"])
def test_a_worker_is_lost_in_the_middle_of_a_step(
    ranks: Run, tmp_path: Path, accident: str, schedule: str, one_machine: bool
) -> None:
    script = script_of(accident, schedule, 20)
    ended = ranks(script, 3, tmp_path, deadline=60, one_machine=one_machine)
    if "kill" in accident:
        assert ended[1].signal == "SIGKILL"
    else:
        assert ended[1].code == 1 and "OSError: boom" in ended[1].err
    for one in (ended[0], ended[2]):
        assert one.code == 5
        assert re.search(r"output of ranks? ([02], )?1\b", message(one, "WorkerLost"))


@pytest.mark.slow
@pytest.mark.crossed
@pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_worker_stays_silent_in_the_middle_of_a_step(
    ranks: Run, tmp_path: Path, schedule: str, one_machine: bool
) -> None:
    """Rank 1 says nothing until the others have ended. It waits longer than they do, who begin when all are there."""
    noted = """
from pathlib import Path
import peers
from paceline.training.recovery.formation import Formation

begin, folder = Formation.__init__, Path(__file__).parent
if RANK == 1:
    Formation.__init__ = lambda own, who, timeout, *more, **named: begin(own, who, 120.0, *more, **named)
peers.note(folder, RANK)
peers.await_all(folder, 3)
"""
    script = script_of("peers.await_end(folder, [0, 2])", schedule, 6).replace(HEAD, HEAD + noted)
    ended = ranks(script, 3, tmp_path, deadline=120, one_machine=one_machine)
    assert all(one.code in (5, 124) for one in ended) and 124 in [one.code for one in ended]
    for one in ended:
        if one.code == 124:
            said = message(one, "WorkerSilent")
            words = (
                r"waited \d+ s for rank 1 to send the"
                if one_machine
                else r"rank 1 sent nothing for \d+ s .* while it sent the"
            )
            assert one.rank != 1 and re.search(words + r" (output|gradient) of stage \d", said)
        else:
            assert "rank" in message(one, "WorkerLost")
