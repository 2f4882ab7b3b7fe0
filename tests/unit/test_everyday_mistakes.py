"""Mistakes that a new user makes in a script for one process: each has one sentence with its cure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import paceline
from paceline.cli.main import main
from paceline.errors import ConfigError, InputError

Dataset = torch.utils.data.TensorDataset


def pairs(count: int = 16) -> Dataset:
    return Dataset(torch.linspace(0, 1, count * 4).reshape(count, 4), torch.arange(count) % 3)


def start(**given: Any) -> paceline.Session:
    usual = {
        "model": torch.nn.Linear(4, 3),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "loss": torch.nn.functional.cross_entropy,
        "data": pairs(),
        "batch": 8,
    }
    return paceline.start(**(usual | given))


def train(steps: int = 2, **given: Any) -> paceline.Session:
    session = start(**given)
    for batch in session.batches(steps=steps):
        session.step(batch)
    return session


WARNED: dict[str, tuple[Callable[[], object], str]] = {
    "a batch larger than the data": (
        lambda: train(batch=100),
        "batch = 100 is more than the 16 samples of the data set: each step takes all of them, and",
    ),
    "no steps": (lambda: train(steps=0), "session.batches(steps=0) is an empty loop, which trains nothing."),
    "no epochs": (lambda: list(start().epochs(0)), "session.epochs(0) is an empty loop, which trains nothing."),
}

REGRESSION = Dataset(pairs().tensors[0], torch.linspace(0, 1, 16))


def backward_by_hand(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(output, target)
    loss.backward(retain_graph=True)
    return loss


class Remembers(torch.nn.Linear):
    last: torch.Tensor | float = 0.0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(values) + self.last
        return self.last


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no samples": (
        lambda: start(data=pairs(0)),
        r"The data set is empty\. data, of type TensorDataset, has the length 0",
    ),
    "a class for the model": (
        lambda: start(model=torch.nn.Linear),
        "model must be .* but it is the class Linear. Give",
    ),
    "text for the loss": (lambda: start(loss="mse"), "loss must be a function, but it is a str. Write, for example"),
    "text for the forward pass": (lambda: start(loss=None, forward="x"), "forward must be a function, but it is a str"),
    "a number for collate": (lambda: start(collate=3), "collate must be a function, but it is an int. Write"),
    "a class for the data": (lambda: start(data=Dataset), r"data is the class TensorDataset: give an object of it"),
    "a generator function": (
        lambda: start(data=lambda: iter(pairs())),
        "data is the function <lambda>: give the data set that it returns, .* a class whose __iter__ yields them",
    ),
    "columns by name": (
        lambda: start(data={"x": [1, 2], "y": [1, 2]}),
        "a dict with the keys 'x', 'y', and samples have",
    ),
    "a class for the schedule": (
        lambda: start(schedule=torch.optim.lr_scheduler.StepLR),
        "The schedule factory could not be called with the optimizer: .* missing 1 required .* 'step_size'",
    ),
    "a loss of one argument": (
        lambda: start(loss=lambda output: output.mean()),
        r"loss must be a function of \(output, target\), but this call would fail: too many .* Write",
    ),
    "a forward without the model": (
        lambda: start(loss=None, forward=lambda batch: batch),
        r"forward must be a function of \(model, microbatch\), but .* Write, for example, def forward\(model",
    ),
    "collate without samples": (
        lambda: start(collate=lambda: 0),
        r"collate must be a function of \(samples\), but this",
    ),
    "a sampler without an epoch": (
        lambda: start(sampler=lambda seed: [0, 1]),
        r"The sampler cannot be called: .* The sampler must be a pure function of \(seed, epoch\)",
    ),
    "an optimizer factory without parameters": (
        lambda: start(optimizer=lambda: None),
        r"could not be called with the parameters: .* Write, for example, optimizer=partial\(",
    ),
    "backward in the loss": (
        lambda: train(loss=backward_by_hand),
        r"The loss, or forward, calls backward\(\) itself: the parameter 'weight' .* Leave backward\(\) out, and",
    ),
    "a kept graph": (
        lambda: train(model=Remembers(4, 3)),
        r"a tensor that an earlier forward pass has kept with its graph, .* forward\(model, microbatch, state\)",
    ),
    "less than a batch": (lambda: start(batch=20, drop_last=True), r"Give a smaller batch, or leave drop_last out\."),
}


@pytest.mark.parametrize("name", WARNED)
def test_one_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    act, says = WARNED[name]
    act()
    assert [one.getMessage().startswith(says) for one in caplog.records if one.levelname == "WARNING"] == [True]


@pytest.mark.parametrize("name", REFUSED)
def test_one_error(name: str) -> None:
    act, says = REFUSED[name]
    with pytest.raises(InputError, match=says):
        act()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lr", r"there is no setting 'lr'\. The optimizer has it: optimizer=partial"),
        ("epochs", r"`for epoch in session\.epochs"),
        ("device", r"session\.device: leave it out"),
        ("num_workers", r"workers_per_loader=\.\.\.; paceline run -n 4"),
        ("criterion", r"It is the argument loss="),
        ("batch_sise", r"Did you mean 'batch"),
    ],
)
def test_arguments_of_other_libraries(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        start(**{name: 3})


def test_shapes_that_broadcast(caplog: pytest.LogCaptureFixture) -> None:
    train(model=torch.nn.Linear(4, 1), loss=squared, data=REGRESSION)
    (text,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "the output has the shape [2, 1] and the target [2], so their difference has the shape [2, 2]" in text


def test_shapes_that_the_loss_makes_equal(caplog: pytest.LogCaptureFixture) -> None:
    train(model=torch.nn.Linear(4, 1), loss=lambda output, target: squared(output.squeeze(1), target), data=REGRESSION)
    assert not [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]


def test_samples_by_number_in_a_dictionary() -> None:
    samples = dict(enumerate(pairs()))
    assert train(data=samples).position == 2


def test_a_script_for_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train.py"])
    assert ended.value.code == 2
    assert (
        "There is no command train.py: to train with this script write paceline run train.py."
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ["-n", "2", "--batch", "16", "train.py"],
            "paceline: batch is a setting, not an option: write --set batch=....",
        ),
        (["--checkpoint.every=5", "train.py"], "write --set checkpoint.every=5."),
        (["-n", "two", "--set", "batch=16", "train.py", "--batch", "16"], ""),
    ],
)
def test_a_setting_as_an_option(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert hint in said and ("is a setting" in said) == bool(hint)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (
            lambda: paceline.start(torch.nn.Linear(4, 3), partial(torch.optim.SGD, lr=0.1)),  # type: ignore[misc,call-arg]
            r"paceline\.start\(Linear, partial\): arguments are given by name, not by position\. Write "
            r"paceline\.start\(model=\.\.\., optimizer=\.\.\., loss=",
        ),
        (
            lambda: start().batches(10),  # type: ignore[misc]
            r"session\.batches\(10\): .* Write session\.batches\(steps=10\) or session\.batches\(epochs=10\)\.",
        ),
        (lambda: start().batches(pairs(), 2), r"batches\(TensorDataset, 2\): .*\(steps=\.\.\.\)"),  # type: ignore[misc]
    ],
)
def test_arguments_by_position(act: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        act()


CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "nothing": (
        lambda one: one.epochs(),
        r"session\.epochs: the argument 'first' is missing\. Write session\.epochs\(10",
    ),
    "another name": (
        lambda one: one.batches(epoch=10),
        r"\.batches\(epoch=\.\.\.\): it has no argument 'epoch'\. Did you mean epochs=\? Write session\.batches\(steps",
    ),
    "one too many": (
        lambda one: one.evaluate(pairs(), squared, squared),
        r"evaluate\(TensorDataset, function, function\): arguments after 'metric' are given by .* forward=\.\.\.\)",
    ),
    "a flag by position": (
        lambda one: one.model_state(True),
        r"model_state\(bool\): .* session.model_state\(everywhere=False\)",
    ),
    "values by name": (
        lambda one: one.log(loss=1.0),
        r"session\.log\(loss=\.\.\.\): .* Write session\.log\(\{'accuracy'",
    ),
    "a name and a value": (lambda one: one.log("loss", 1.0), r"log\(str, float\): arguments after 'values' are"),
    "a value without a name": (
        lambda one: one.register([1]),
        r"register\(list\): .* Write session\.register\(name=value",
    ),
    "a path": (lambda one: one.save("x.pt"), r"session\.save\(str\): it takes no arguments\. Write .* session\.export"),
    "a file to print to": (lambda one: one.print(1, file=2), "print.*it has no argument 'file'"),
    "a session from its class": (lambda one: type(one)(1), r"Session: .* Write session = paceline\.start"),
    "no optimizer": (
        lambda one: paceline.start(model=torch.nn.Linear(4, 3), data=pairs(), batch=8),  # type: ignore[call-arg]
        r"paceline\.start: the argument 'optimizer' is missing\. Write paceline\.start\(model=",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call(name: str) -> None:
    act, says = CALLS[name]
    with pytest.raises(ConfigError, match=says):
        act(start())


def test_a_type_error_of_the_users_own_function_stays() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        start().once(lambda: 1 + "")  # type: ignore[operator]


def test_once_without_a_function() -> None:
    with pytest.raises(InputError, match=r"and not its result, but it got an int\. Write session\.once\(function"):
        start().once(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model", "A session has no 'model': it is the object that the script gave"),
        ("close", "a session ends with the script"),
        ("backward", r"write `for batch in session\.batches\(\): session\.step\(batch\)`"),
        ("fingerprnt", r"did you mean session\.fingerprint\?"),
    ],
)
def test_attributes_of_other_libraries(name: str, says: str) -> None:
    session = start()
    assert not hasattr(session, name)
    with pytest.raises(AttributeError, match=says):
        getattr(session, name)


def test_a_session_is_no_loop_and_no_context() -> None:
    session: Any = start()
    with pytest.raises(InputError, match=r"not a loop over batches: write `for batch in session\.batches"):
        iter(session)
    with pytest.raises(InputError, match=r"write session = paceline\.start"), session:
        pass


@pytest.mark.parametrize("loss", [torch.nn.CrossEntropyLoss(), partial(torch.nn.functional.cross_entropy, weight=None)])
def test_functions_of_any_kind(loss: Any) -> None:
    assert (
        train(
            loss=loss,
            sampler=lambda seed, epoch=0, *more: range(16),
            collate=lambda items, extra=1: (
                items and (torch.stack([one[0] for one in items]), torch.stack([one[1] for one in items]))
            ),
        ).position
        == 2
    )


def test_a_launcher_in_the_place_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "torchrun", "--nproc-per-node", "2", "mine.py"])
    assert ended.value.code == 2
    assert "as in paceline run -n 2 mine.py, or write torchrun without paceline run." in capsys.readouterr().err


def test_a_step_without_a_batch() -> None:
    model, data = torch.nn.Linear(2, 1), torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    sgd = partial(torch.optim.SGD, lr=0.1)
    session = paceline.start(model=model, optimizer=sgd, loss=torch.nn.functional.mse_loss, data=data, batch=4)
    with pytest.raises(InputError, match=r"session\.step takes a batch from session\.batches\(\), got none\."):
        session.step()
