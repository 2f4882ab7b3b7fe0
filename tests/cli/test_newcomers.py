"""The mistakes of those who are new to it, under ``paceline run``: each has one message that says what to do."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from fork_server import PACELINE, Command, ForkServer

import paceline
from paceline.cli.display.progress import Progress
from paceline.cli.main import main
from paceline.errors import ConfigError

SLOW = ("starting 2 workers", "step ")
"""How lines begin that are told only where a run takes longer than ten seconds."""
HEAD = """
import os
from functools import partial
import torch
import paceline
from torch import nn
from torch.nn.functional import cross_entropy

class Samples(torch.utils.data.Dataset):
    def __init__(self, make):
        self.make = make
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return self.make(torch.linspace(0, 1, 8).roll(index), index % 3)

second = os.environ["RANK"] == "1"
pairs = Samples(lambda x, y: (x, y))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
SGD = partial(torch.optim.SGD, lr=0.1)

def start(**given):
    usual = {"model": model, "optimizer": SGD, "loss": cross_entropy, "data": pairs, "batch": 32}
    return paceline.start(**usual | given)

def train(**given):
    session = start(**given)
    for batch in session.batches(steps=2):
        session.step(batch)
    return session

def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()
"""

# by name: the script, the exit code, what is said once, and no other message
MISTAKES = {
    "a batch that is unpacked": (
        """
session = start()
for inputs, targets in session.batches(steps=2):
    session.step((inputs, targets))
""",
        2,
        "A batch is shared out among the workers, so it has no values to unpack.",
        "Write `for batch in session.batches(): session.step(batch)`",
    ),
    "a value of a batch": (
        """
session = start()
for batch in session.batches(steps=2):
    session.step(model(batch.inputs))
""",
        1,
        "A batch is shared out among the workers, so it has no 'inputs'.",
        "Write `for batch in session.batches(): session.step(batch)`",
    ),
    "evaluation mode": (
        "model.eval(); train()",
        0,
        "the model is in evaluation mode: it is trained without dropout",
        "Call model.train() before paceline.start",
    ),
    "no target": (
        "train(data=Samples(lambda x, y: {'x': x, 'label': y}))",
        2,
        "but it gives dictionaries with the keys 'x', 'label', and it is unknown which is the target.",
        "Use forward=",
    ),
    "another learning rate later": (
        """
made = []
session = start(optimizer=lambda parameters: made.append(SGD(parameters)) or made[0])
for batch in session.batches(steps=6):
    session.step(batch)
    made[0].param_groups[0]["lr"] = 0.2 if second else 0.1
""",
        3,
        "The optimizer's lr of group 0 is 0.1 on rank 0 and 0.2 on rank 1",
        "Change hyper-parameters alike on all workers.",
    ),
    "a metric": (
        """
def misspelt(output, target):
    return output.flaot().mean()
train().evaluate(pairs, misspelt)
""",
        1,
        "AttributeError: 'Tensor' object has no attribute 'flaot' (train.py:",
        "",
    ),
    "a batch norm of single samples": (
        "train(model=nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)), batch=8)",
        1,
        "Expected more than 1 value per channel when training, got input size torch.Size([1, 8]) (train.py:",
        " (1 sample) of step 0. For larger microbatches set a larger",  # microbatch 0 or 4: whichever rank was first
    ),
    "a layer of another stage": (
        """
session = start(strategy="pipeline")
for batch in session.batches(steps=4):
    session.step(batch)
    if batch.step == 1:
        model(torch.ones(2, 8))
""",
        2,
        "was called between two steps of a pipeline, when this worker has the weights of its own stages only.",
        "Measure with session.evaluate(...)",
    ),
    "no start": (
        "print(torch.ones(3).sum())",
        0,
        "note: train.py did not call paceline.start, so Paceline trained nothing.",
        "Start training with session = paceline.start(...).",
    ),
    "a batch twice": (
        """
session = start()
for batch in session.batches(steps=4):
    session.step(batch)
    session.step(batch)
""",
        2,
        "The batch of step 0 was given to session.step before: it has made its update.",
        "Call session.step once for each batch",
    ),
    "batches in a list": (
        """
session = start()
for batch in list(session.batches(steps=4)):
    session.step(batch)
""",
        2,
        "The batch of step 0 is over: the script already has later ones.",
        "Give each batch to session.step once, before you take the next.",
    ),
    "no step": (
        """
session = start()
for batch in session.batches(steps=4):
    pass
""",
        0,
        "None of the 4 batches of this loop was given to session.step, so nothing was trained",
        "call session.step(batch) for each",
    ),
    "a loader to evaluate": (
        "train().evaluate(torch.utils.data.DataLoader(pairs, batch_size=4), lambda output, target: output.mean())",
        2,
        "evaluate makes batches by itself, and would take each batch of this DataLoader for one sample",
        "give it loader.dataset, a ",
    ),
    "columns for data": (
        "train(data=(torch.randn(64, 8), torch.zeros(64).long()))",
        2,
        "data is a tuple of 2 tensors or arrays with 64 entries each, which would count as 2 samples.",
        "Give torch.utils.data.TensorDataset(inputs, targets)",
    ),
    "data that grow": (
        """
data = [pairs[index] for index in range(64)]
session = start(data=data)
for epoch in session.epochs(2):
    for batch in session.batches():
        session.step(batch)
    data += data[:8]
""",
        2,
        "The data set had 64 samples at the start and has 72 in step 2.",
        "give start(data=paceline.data.Growing(samples)) and call session.extend, or give a stream",
    ),
    "a number for the loss": (
        "train(loss=lambda output, target: cross_entropy(output, target).item())",
        2,
        "but it is a float.",
        "Return the tensor itself, without .item() or float().",
    ),
    "a class for the loss": (
        "train(loss=nn.CrossEntropyLoss)",
        2,
        "CrossEntropyLoss is a class",
        "give an object of it, CrossEntropyLoss().",
    ),
    "backward on a report": (
        """
session = start()
for batch in session.batches(steps=4):
    session.step(batch).loss.backward()
""",
        1,
        "AttributeError: 'float' object has no attribute 'backward' (train.py:",
        "leave out backward(), zero_grad() and optimizer.step(): session.step has done all three",
    ),
    "a question": (
        "start(); rate = float(input('learning rate: '))",
        1,
        "EOFError: EOF when reading a line (train.py:",
        "What it means: the script waits for input from the keyboard, and a worker reads nothing from the terminal.",
    ),
    "print": (
        "train(); print(); print('accuracy', 0.5); print('loss', 0.25); print('rank', second)",
        0,
        "note: all 2 workers printed 'accuracy 0.5'; the terminal shows rank 0.",
        "session.print prints on rank 0 alone",
    ),
}


@pytest.fixture
def run(fork_server: ForkServer, tmp_path: Path) -> Callable[[str], tuple[int, str]]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}

    def start(script: str) -> tuple[int, str]:
        (tmp_path / "train.py").write_text(HEAD + script)
        words = (*PACELINE, "run", "-n", "2", "train.py")
        command = Command(words, own, tmp_path / "out", tmp_path / "err", tmp_path)
        return fork_server.run(command, 100.0), command.err.read_text()

    return start


@pytest.mark.promise(
    "docs/optimizers.md", "they are compared in each step, and an error names the group and the value on each rank."
)
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_one_message(run: Callable[[str], tuple[int, str]], name: str) -> None:
    script, code, says, cure = MISTAKES[name]
    ended, said = run(script)
    assert ended == code, said
    message = said.partition("Traceback")[0]
    assert message.count(says) == 1 and cure in message, said
    assert said.count("Traceback (most recent call last)") == (code != 0), said
    if code:  # it is the first thing said of the failure
        before = ("2 workers on", "[rank 0]", *SLOW)
        first = next(line for line in message.splitlines() if not line.startswith(before))
        assert says in first, said


def test_a_script_without_mistakes(run: Callable[[str], tuple[int, str]], tmp_path: Path) -> None:
    ended, said = run(
        """
def loss(output, target):
    return (cross_entropy(output, target, reduction="sum"), len(target)), {"accuracy": accuracy(output, target)}
session = start(loss=loss)
for epoch in session.epochs(3):
    for batch in session.batches():
        session.step(batch)
session.print("done")
"""
    )
    assert ended == 0
    assert [line for line in said.splitlines() if not line.startswith(("2 workers on", "done in", *SLOW))] == []
    seen = Progress()
    (records,) = tmp_path.glob("runs/*/events/rank-0.jsonl")
    for number, line in enumerate(records.read_text().splitlines()):
        seen.take(json.loads(line))
        if '"batches"' in line:  # of each epoch: the steps of all three
            assert seen.steps == 6, number
    assert seen.text().startswith("step 6/6  loss 1.") and "  accuracy 0." in seen.text()


def test_a_number_of_workers_that_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "-n", "two", "train.py"])
    assert ended.value.code == 2
    assert "'two' is not a whole number. Give the number of workers, as in -n 4." in capsys.readouterr().err


def test_what_is_not_for_launch() -> None:
    with pytest.raises(ConfigError, match=r"launch calls a function, and was given 'train\.py': start a script with"):
        paceline.launch("train.py")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no argument 'seed'\..* write settings=\{'seed': 7\}\."):
        paceline.launch(print, seed=7)
    with pytest.raises(ConfigError, match=r"no argument 'depth'\..* by position: launch\(f, 3\)\. Options"):
        paceline.launch(print, depth=3)


def test_what_only_looks_like_a_mistake(caplog: pytest.LogCaptureFixture) -> None:
    samples = tuple(torch.linspace(0, 1, 64).roll(number) for number in range(16))
    session = paceline.start(
        model=torch.nn.Linear(64, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        forward=lambda model, batch: model(batch).square().mean(),
        data=samples,
        batch=8,
    )
    running = session.batches(steps=4)
    batch = next(running)
    reports = []
    for following in running:  # it looks one batch ahead
        reports.append(session.step(batch))
        batch = following
    reports.append(session.step(batch))
    assert ([one.step for one in reports], session.position) == ([0, 1, 2, 3], 4)
    one_by_one = torch.utils.data.DataLoader(samples, batch_size=None)  # type: ignore[arg-type]
    mean = session.evaluate(one_by_one, lambda model, batch: model(batch).mean())
    assert mean == pytest.approx(session.evaluate(samples, lambda model, batch: model(batch).mean()))
    assert not [one for one in caplog.records if one.levelname == "WARNING"]
