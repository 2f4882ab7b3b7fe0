"""What cannot work ends on every worker, soon, with a message that says what, with which values, and what to do."""

import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

from paceline import errors
from paceline.testing.ranks import Ended, Worker, run

Run = Callable[..., list[Ended]]
Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
import os, sys, time
from functools import partial
import torch
from torch.nn import functional
import paceline
from paceline.data.order import Order
from subjects import *

RANK = int(os.environ["RANK"])
given = CASES["mlp, momentum"]() | {"timeout_seconds": 30}

def go(steps=4, **changes):
    session = paceline.start(**(given | changes))
    for batch in session.batches(steps=steps):
        session.step(batch)
    print("done", flush=True)

def spoiled(step, microbatch, value):
    # data with this value in the first sample of a microbatch of a step
    data = classes(256)
    data.tensors[0][Order(256, 64, 8, 0).microbatches_of(step)[microbatch][0]] = value
    return data

def only(test, *then):
    # the loss, with an accident on some workers
    def loss(output, target):
        if test():
            accident()
        return functional.cross_entropy(output, target)
    return loss
"""

# runs scripts one after the other, each of which must be refused, and tells how
REFUSALS = """
import os, runpy
from pathlib import Path
from paceline.errors import PacelineError
from subjects import tell

environment = dict(os.environ)
for script in sorted(Path(os.environ["SCRIPTS"]).iterdir()):
    try:
        runpy.run_path(str(script), run_name="__main__")
    except PacelineError as error:
        tell(**{script.stem: (type(error).__name__, str(error))})
    os.environ.clear()
    os.environ.update(environment)
"""

# the time that rank 0 waits for the others begins when those that come are there, however late
AWAITED = """
import peers
from paceline.comm.rendezvous.env_init import EnvRendezvous

wait = EnvRendezvous._await_everyone

def wait_later(rendezvous, store, address, who):
    keys = [f"paceline/{{who.generation}}/here/{{rank}}" for rank in {coming} if who.rank == 0]
    peers.until(lambda: all(store.check([key]) for key in keys))
    wait(rendezvous, store, address, who)

EnvRendezvous._await_everyone = wait_later
"""


@dataclass(frozen=True)
class Bad:
    """A script that must fail: its end, the error, words of the message, how many workers."""

    body: str
    error: str
    words: Sequence[str]
    workers: int = 2

    @property
    def code(self) -> int:
        """The exit code."""
        code: int = getattr(errors, self.error).exit_code
        return code


TOGETHER = {
    "a loss for each sample": Bad(
        "go(loss=partial(functional.cross_entropy, reduction='none'))",
        "InputError",
        ["must be a scalar tensor", "shape [8]", ".mean()"],
    ),
    "a loss that is no tensor": Bad("go(loss=lambda output, target: 3.5)", "InputError", ["scalar", "float"]),
    "a loss without parameters": Bad(
        "go(loss=lambda output, target: output.detach().mean())", "InputError", ["does not depend on any parameter"]
    ),
    "a stream": Bad("go(data=(item for item in classes(9)))", "InputError", ["generator", "only once", "__iter__"]),
    "a stream that is empty": Bad(
        "class Nothing:\n    def __iter__(self): return iter(())\ngo(data=Nothing())", "InputError", ["no samples"]
    ),
    "a stream and loader processes": Bad(
        "class Rows:\n    def __iter__(self): return iter(classes(9))\ngo(data=Rows(), workers_per_loader=2)",
        "ConfigError",
        ["workers_per_loader = 2", "each loader process"],
    ),
    "another stream on each rank": Bad(
        "class Mine:\n    def __iter__(self): return ((row + RANK, to) for row, to in classes(9))\ngo(data=Mine())",
        "DisagreementError",
        ["data first sample", "whole data set"],
    ),
    "another sampler on each rank": Bad(
        "go(sampler=lambda seed, epoch: [RANK, *range(1, 20)])", "DisagreementError", ["data order by the sampler"]
    ),
    "a loader": Bad(
        "go(data=torch.utils.data.DataLoader(classes(9), batch_size=3, drop_last=True, num_workers=2))",
        "InputError",
        ["DataLoader", "data=loader.dataset", "batch=3", "drop_last=True", "workers_per_loader=2"],
    ),
    "a file as data": Bad("go(data='rows.csv')", "InputError", ["data is 'rows.csv', a str", "data set that reads"]),
    "data without length": Bad(
        "class Endless:\n    def __getitem__(self, place): return place\ngo(data=Endless())",
        "InputError",
        ["Endless", "no length"],
    ),
    "no data": Bad("go(data=[])", "InputError", ["The data set is empty."]),
    "fewer samples than microbatches": Bad(
        "go(batch=4, microbatches=8)", "ConfigError", ["batch = 4", "8 microbatches"]
    ),
    "fewer samples than workers": Bad(
        "go(batch=2)", "ConfigError", ["batch = 2", "3 workers are more than the 2 microbatches"], workers=3
    ),
    "fewer microbatches than workers": Bad(
        "go(microbatches=2)", "ConfigError", ["3 workers", "2 microbatches"], workers=3
    ),
    "an epoch without a batch": Bad(
        "go(data=classes(50), drop_last=True)", "InputError", ["50 samples", "batch of 64", "drop_last"]
    ),
    "an optimizer that is made already": Bad(
        "go(optimizer=torch.optim.SGD(given['model'].parameters()))", "InputError", ["factory", "SGD", "partial("]
    ),
    "a schedule that is made already": Bad(
        "optimizer = torch.optim.SGD(given['model'].parameters())\n"
        "go(schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1))",
        "InputError",
        ["factory", "StepLR", "partial("],
    ),
    "a schedule that needs a metric": Bad(
        "go(schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)",
        "InputError",
        ["ReduceLROnPlateau", "step() needs 'metrics'", "number of updates", "LambdaLR", "session.optimizer"],
    ),
    "a schedule whose steps need values": Bad(
        "class Own(torch.optim.lr_scheduler.StepLR):\n"
        "    def step(self, epoch=None, *more, loss, best): raise AssertionError\n"
        "    _initial_step = lambda self: None\n"
        "go(schedule=partial(Own, step_size=1))",
        "InputError",
        ["Own cannot be the schedule", "step() needs 'loss' and 'best'"],
    ),
    "a factory of something else": Bad("go(optimizer=list)", "InputError", ["torch optimizer", "list"]),
    "no batch": Bad("del given['batch']; go()", "ConfigError", ["batch_per_worker", "neither"]),
    "two batches": Bad("go(batch_per_worker=32)", "ConfigError", ["batch_per_worker", "both"]),
    "no loss": Bad("del given['loss']; go()", "ConfigError", ["forward(model, microbatch)", "neither"]),
    "no model": Bad("go(model=lambda value: value)", "InputError", ["torch.nn.Module", "function"]),
    "an unknown strategy": Bad(
        "go(strategy='alreduce')", "ConfigError", ["'alreduce'", "Did you mean 'allreduce'?", "single"]
    ),
    "one process for two workers": Bad("go(strategy='single')", "ConfigError", ["one process", "2 workers"]),
    "an unknown setting": Bad(
        "go(batchsize=8)", "ConfigError", ["there is no setting 'batchsize'. Did you mean 'batch'?"]
    ),
    "a setting of the wrong kind": Bad(
        "go(batch='abc')", "ConfigError", ["batch = 'abc'", "It is: samples per step over all workers.", "script"]
    ),
    "an unknown class to recompute": Bad("go(recompute=['Block'])", "InputError", ["'Block'", "Linear, Sequential"]),
    "a misspelled choice of what to recompute": Bad(
        "go(recompute='automatic')", "InputError", ["no module of class 'automatic'", "recompute='auto'"]
    ),
    "a choice of what to recompute without a budget": Bad(
        "go(recompute='auto')", "ConfigError", ["recompute = 'auto'", "memory_gigabytes"]
    ),
    "a budget of a compiled model": Bad(
        "go(memory_gigabytes=1, compile=True)", "ConfigError", ["memory_gigabytes", "compile=True"]
    ),
    "too small a budget": Bad(
        "go(memory_gigabytes=0.000001)",
        "ConfigError",
        ["1,000 bytes", "bytes too many", "weights", "optimizer", "sums of", "a microbatch of 8 samples"],
    ),
    "a budget for more workers": Bad(
        "go(memory_gigabytes=0.0000053, optimizer=torch.optim.AdamW)",
        "ConfigError",
        ["5,300 bytes", "It fits with", 'workers and strategy="sharded"'],
    ),
    "scaling without a batch that grows": Bad(
        "go(scale_lr='linear')", "ConfigError", ["scale_lr = 'linear'", "batch_per_worker"]
    ),
    "a warm-up to nowhere": Bad("go(warmup_steps=5)", "ConfigError", ["warmup_steps = 5", "scale_lr"]),
    "weights that differ": Bad(
        "torch.manual_seed(RANK)\ngo(model=torch.nn.Sequential(torch.nn.Linear(12, 4)))",
        "DisagreementError",
        ["initial value of 0.weight", "rank 0: ", "rank 2: ", "torch.manual_seed"],
        workers=3,
    ),
    "learning rates that differ": Bad(
        "go(optimizer=partial(torch.optim.SGD, lr=0.1 * (1 + RANK)))",
        "DisagreementError",
        ["optimizer lr of group 0", "rank 0: 0.1", "rank 1: 0.2"],
    ),
    "optimizers that differ": Bad(
        "go(optimizer=torch.optim.SGD if RANK else torch.optim.AdamW)",
        "DisagreementError",
        ["optimizer class", "rank 0: AdamW", "rank 1: SGD"],
    ),
    "settings that differ": Bad(
        "go(seed=RANK)", "DisagreementError", ["setting seed", "rank 0: 0", "rank 1: 1", "same settings"]
    ),
    "parameters frozen on one worker": Bad(
        "given['model'][0].bias.requires_grad_(RANK == 0)\ngo()",
        "DisagreementError",
        ["trained parameter 0.bias", "rank 0: 0", "rank 1: nothing", "Freeze the same"],
    ),
    "parameters that one optimizer leaves out": Bad(
        "go(optimizer=lambda values: torch.optim.SGD(values[RANK:], lr=0.1))",
        "DisagreementError",
        ["trained parameter 0.weight", "rank 0: 0", "rank 1: None"],
    ),
    "data sets that differ": Bad(
        "go(data=classes(256 - RANK))", "DisagreementError", ["data length", "rank 0: 256", "rank 1: 255"]
    ),
    "data that the script has divided": Bad(
        "go(data=torch.utils.data.Subset(classes(256), range(RANK, 256, 2)))",
        "DisagreementError",
        ["data samples 0, 18, 36, 54, 72, 90, 108, 127", "rank 0: ", "rank 1: ", "whole data set"],
    ),
    "data that the script has shuffled": Bad(
        "import random\nrows = list(classes(256))\nrandom.Random(RANK).shuffle(rows)\ngo(data=rows)",
        "DisagreementError",
        ["data samples 0, 36, ", "same order", "same seed everywhere"],
    ),
    **{
        f"fixed point with {strategy}": Bad(
            f"go(exact='fixed-point', strategy={strategy!r})", "ConfigError", [reason, "or 'stealing'"]
        )
        for strategy, reason in {
            "pipeline": "strategy 'pipeline' cannot add up gradients in fixed point",
            "parameter-server": "strategy 'parameter-server' cannot add up gradients in fixed point",
            "hogwild": "cannot give the same bits",
            "backup": "cannot give the same bits",
        }.items()
    },
    "a parameter that was expanded": Bad(
        "model = torch.nn.Linear(12, 4)\n"
        "model.bias = torch.nn.Parameter(torch.zeros(1).expand(4))\n"
        "go(model=model, strategy='sharded')",
        "InputError",
        ["'bias' of shape [4] and strides [0]", "in the same memory, as after expand()", "clone()"],
    ),
    "weights tied by their data": Bad(
        "model = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Linear(12, 12))\n"
        "model[1].weight.data = model[0].weight.data\n"
        "go(model=model, strategy='sharded')",
        "InputError",
        ["'0.weight' and '1.weight' have memory in common", "'sharded'", "decoder.weight = encoder.weight"],
    ),
    "complex parameters in fixed point": Bad(
        "del given['loss']\nmodel = torch.nn.Linear(4, 4, dtype=torch.complex64)\n"
        "data = torch.utils.data.TensorDataset(torch.randn(64, 4, dtype=torch.complex64))\n"
        "go(model=model, forward=lambda model, data: model(data[0]).abs().mean(), data=data, exact='fixed-point')",
        "ConfigError",
        ["'weight' is of type torch.complex64", "exact=True"],
    ),
    "a gradient from some samples only": Bad(
        "go(model=gated(), exact=True)", "InputError", ["'second.weight'", "microbatch ", "missing_gradient='zero'"]
    ),
    "a gradient on some workers only": Bad(
        "def forward(model, data):\n"
        "    values, target = data\n"
        "    output = model.first(values)\n"
        "    return functional.cross_entropy(output + model.second(values) if RANK == 1 else output, target)\n"
        "del given['loss']\n"
        "go(model=gated(), forward=forward, exact=True)",
        "InputError",
        ["'second.weight'", "microbatch 0 on rank 0", "microbatch 7 on rank 2", "depends on the rank"],
        workers=3,
    ),
    "a stream that is split in its second epoch": Bad(
        "class Split:\n    passes = 0\n    def __iter__(self):\n        self.passes += 1\n"
        "        return iter([*classes(20)][RANK if self.passes > 1 else 0:])\n"
        "go(data=Split(), batch=8)",
        "DisagreementError",
        ["stream gives different samples on rank 1", "step 3.", "get_rank()"],
    ),
    "no batch of the session": Bad(
        "paceline.start(**given).step((torch.zeros(1, 12), torch.zeros(1)))",
        "InputError",
        ["session.step takes a batch from session.batches()", "not a tuple"],
    ),
    "a loss over nothing": Bad(
        "del given['loss']\ngo(forward=lambda model, data: (model(data[0]).sum(), 0))", "InputError", ["count of 0"]
    ),
}

promise = pytest.mark.promise
PROMISES = {
    "weights that differ": promise(
        "docs/launch.md",
        "`start` compares once, before the first step",
        "The workers do not agree on initial value of 0.weight: rank 0: ",
    ),
    "data sets that differ": promise(
        "docs/errors.md", "`The workers do not agree on data length: rank 0: 1000, rank 1: 900."
    ),
    "data that the script has shuffled": promise(
        "docs/launch.md", "So data that a script has divided by rank, or shuffled without a seed, are noticed."
    ),
    "settings that differ": promise(
        "docs/train.md", "compares their code, versions, settings and weights. If something differs, it stops"
    ),
    "optimizers that differ": promise(
        "docs/launch.md", "the optimizer and its values, and the initial value of each parameter and buffer."
    ),
    "an unknown setting": promise("docs/errors.md", "there is no setting 'batchsize'. Did you mean 'batch'? ..."),
    "a setting of the wrong kind": promise(
        "docs/errors.md", "Each message says what is wrong, with which values, and what to do."
    ),
    "a loader": promise(
        "docs/data.md",
        "A `DataLoader` is refused, and the error says what to give instead: its data set, batch and `collate`.",
    ),
    "no data": promise("docs/errors.md", "paceline: rank 1: InputError: The data set is empty."),
    "a stream": promise("docs/streams.md", "A generator object is refused, because it gives its samples only once."),
    "fewer microbatches than workers": promise("docs/batch-size.md", "**More workers than microbatches** is refused."),
    "scaling without a batch that grows": promise(
        "docs/batch-size.md",
        "`scale_lr` without `batch_per_worker` is refused: a constant batch needs no other rate.",
    ),
    "a schedule that needs a metric": promise(
        "docs/train.md", "one whose `step` needs a metric, such as `ReduceLROnPlateau`, is refused"
    ),
    "an optimizer that is made already": promise("docs/optimizers.md", "`optimizer` is a factory: Paceline calls it."),
    "a loss for each sample": promise(
        "docs/errors.md", "`The loss must be a scalar tensor (the mean over the samples it is given)"
    ),
    "a gradient from some samples only": promise(
        "docs/losses.md", "`step` raises `InputError` and names the parameter and the microbatches."
    ),
}

WHILE_TRAINING = {
    "a loss that is not a number": Bad(
        "go(data=spoiled(2, 5, float('nan')), microbatches=8)",
        "NonFiniteLoss",
        ["nan", "step 2, microbatch 5,", "rank 1", "nonfinite='skip'"],
    ),
    "an infinite loss": Bad(
        "model = torch.nn.Linear(12, 4)\ntorch.nn.init.ones_(model.weight); torch.nn.init.zeros_(model.bias)\n"
        "go(model=model, data=spoiled(1, 0, 3e38), exact=True, loss=lambda output, target: output.square().mean())",
        "NonFiniteLoss",
        ["inf", "step 1, microbatch 0,", "rank 0"],
    ),
    "not a number in a joined pass": Bad(
        "go(data=spoiled(2, 5, float('nan')))", "NonFiniteLoss", ["nan", "step 2, microbatch 5,", "rank 1"]
    ),
}


def message(one: Ended, error: str) -> str:
    """What a worker says at its end: the error in one line, and no traceback."""
    start = f"paceline: rank {one.rank}: {error}: "
    lines = [line for line in one.err.splitlines() if line.startswith(start)]
    assert len(lines) == 1, one
    assert "Traceback" not in one.err
    return lines[0].removeprefix(start)


def check(ended: list[Ended], bad: Bad) -> None:
    for one in ended:
        said = message(one, bad.error)
        assert one.code == bad.code
        assert "done" not in one.out
        for word in bad.words:
            assert word in said


def refusals(printed: Printed, head: str, cases: dict[str, Bad], directory: Path) -> dict[str, list[Any]]:
    """How each worker refused each case: the error and the message, with one start for all cases."""
    found: dict[str, list[Any]] = {name: [] for name in cases}
    for workers in {case.workers for case in cases.values()}:
        scripts = directory / str(workers)
        scripts.mkdir()
        for name, case in cases.items():
            if case.workers == workers:
                (scripts / f"{name}.py").write_text(head + case.body)
        for one in printed(REFUSALS, workers, directory, environment={"SCRIPTS": str(scripts)}, deadline=120):
            for name in one:
                found[name].append(one[name])
    return found


def check_refusal(found: list[Any], bad: Bad) -> None:
    assert len(found) == bad.workers, "a worker has trained"
    for error, said in found:
        assert error == bad.error, said
        assert all(word in said for word in bad.words), said


@pytest.fixture(scope="module")
def refused(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return refusals(printed, HEAD, TOGETHER, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=PROMISES.get(name, ())) for name in TOGETHER])
def test_what_all_workers_refuse(refused: dict[str, list[Any]], name: str) -> None:
    check_refusal(refused[name], TOGETHER[name])


@pytest.mark.promise(
    "docs/losses.md", "`step` raises `NonFiniteLoss` before the update, with the step, the microbatch and the rank."
)
@pytest.mark.sampled(4)
@pytest.mark.crossed
@pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
@pytest.mark.parametrize("name", WHILE_TRAINING)
def test_while_training(ranks: Run, tmp_path: Path, name: str, one_machine: bool) -> None:
    bad = WHILE_TRAINING[name]
    check(ranks(HEAD + bad.body, bad.workers, tmp_path, deadline=60, one_machine=one_machine), bad)


def test_alone_the_message_names_no_rank(ranks: Run, tmp_path: Path) -> None:
    (one,) = ranks(HEAD + "go(batch=4, microbatches=8)", 1, tmp_path)
    assert one.code == 2
    assert one.err.startswith("paceline: ConfigError: batch = 4 ")
    assert one.err.rstrip().endswith(f"[script.py, line {HEAD[: HEAD.index('paceline.start')].count(chr(10)) + 1}]")


@pytest.mark.sampled(1)
@pytest.mark.crossed
@pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
@pytest.mark.parametrize("accident", ["raise OSError('boom')", "sys.exit(7)", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_an_accident_on_one_worker(ranks: Run, tmp_path: Path, accident: str, one_machine: bool) -> None:
    body = f"""
def accident():
    {accident}
calls = []
go(steps=20, microbatches=8, loss=only(lambda: RANK == 1 and (calls.append(1) or len(calls) == 25)))
"""
    ended = ranks(HEAD + body, 3, tmp_path, deadline=60, one_machine=one_machine)
    assert ended[1].code == {"r": 1, "s": 7}.get(accident[0], -9 if "kill" in accident else 0)
    if "boom" in accident:
        assert "OSError: boom" in ended[1].err
    for one in (ended[0], ended[2]):
        assert one.code == 5
        assert re.search(r"output of ranks? (0, )?1\b", message(one, "WorkerLost"))


@pytest.mark.slow
@pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
def test_a_worker_that_stays_silent(ranks: Run, tmp_path: Path, one_machine: bool) -> None:
    """Rank 1 says nothing until rank 0 has ended."""
    body = """
from pathlib import Path
import peers
folder = Path(__file__).parent
def accident():
    peers.await_end(folder, [0])
calls = []
peers.note(folder, RANK)
if RANK == 1:  # only rank 0 may find the other one silent
    from paceline.training.recovery.formation import Formation
    begin = Formation.__init__
    Formation.__init__ = lambda own, who, timeout, *more, **named: begin(own, who, 120.0, *more, **named)
go(steps=20, microbatches=8, timeout_seconds=5, loss=only(lambda: RANK == 1 and (calls.append(1) or len(calls) == 25)))
"""
    body = AWAITED.format(coming=[1]) + body
    ended = ranks(HEAD + body, 2, tmp_path, deadline=120, one_machine=one_machine)
    assert [one.code for one in ended] == [124, 5]
    said = message(ended[0], "WorkerSilent")
    assert "rank 1" in said
    assert "timeout_seconds" in said
    message(ended[1], "WorkerLost")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
@pytest.mark.parametrize("skipped", [1, 2], ids=["inside", "before a short batch"])
def test_a_worker_that_leaves_out_a_batch(ranks: Run, tmp_path: Path, skipped: int, one_machine: bool) -> None:
    body = f"""
session = paceline.start(**given | {{"data": classes(200), "exact": True, "timeout_seconds": 30}})
for batch in session.batches(epochs=3):
    if batch.step != {skipped} or RANK != 1:
        session.step(batch)
print("done")
"""
    ended = ranks(HEAD + body, 3, tmp_path, deadline=60, one_machine=one_machine)
    for one in ended:
        assert one.code in (3, 5)
        said = message(one, "DisagreementError" if one.code == 3 else "WorkerLost")
        if one.code == 3:
            assert f"rank 0 at step {skipped}, rank 1 at step {skipped + 1}" in said
    assert any(one.code == 3 for one in ended)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("one_machine", [True, False], ids=["memory", "network"])
def test_a_worker_that_ends_early(ranks: Run, tmp_path: Path, one_machine: bool) -> None:
    ended = ranks(HEAD + "go(steps=6 if RANK else 9)", 3, tmp_path, deadline=60, one_machine=one_machine)
    assert [one.code for one in ended] == [5, 0, 0]
    assert "rank" in message(ended[0], "WorkerLost")


def test_scripts_that_differ(fork_server: ForkServer, tmp_path: Path) -> None:
    other = tmp_path / "other" / "script.py"
    other.parent.mkdir()
    other.write_text(HEAD + "go()  # changed")

    def start(workers: list[Worker]) -> Sequence[object]:
        return fork_server.start_workers([workers[0], replace(workers[1], script=other)])

    ended = run(HEAD + "go()", 2, tmp_path, start=start, deadline=60)
    check(ended, Bad("", "DisagreementError", ["code of script.py", "rank 0: ", "same files"]))


def test_modules_that_differ(fork_server: ForkServer, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("here", "there")]
    for folder in folders:
        folder.mkdir()
        (folder / "script.py").write_text(HEAD + "import part\ngo()")
        (folder / "part.py").write_text(f"lr = {len(folder.name)}")

    def start(workers: list[Worker]) -> Sequence[object]:
        pairs = zip(workers, folders, strict=True)
        return fork_server.start_workers([replace(worker, script=folder / "script.py") for worker, folder in pairs])

    ended = run("", 2, tmp_path, start=start, deadline=60)
    check(ended, Bad("", "DisagreementError", ["code of part.py", "rank 0: ", "rank 1: "]))


@pytest.mark.slow
def test_a_port_in_use(ranks: Run, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        body = HEAD + "go(timeout_seconds=3)"
        ended = ranks(body, 2, tmp_path, environment={"MASTER_PORT": port}, deadline=60)
    said = message(ended[0], "StartError")
    assert f"Port {port} on 127.0.0.1 is in use" in said
    assert "--port" in said
    assert port in message(ended[1], "StartError")
    assert [one.code for one in ended] == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("absent", "words"), [((1,), "rank 1 of 3"), ((1, 2), "ranks 1, 2 of 3"), ((0,), "reach rank 0")]
)
def test_workers_that_do_not_come(ranks: Run, tmp_path: Path, absent: tuple[int, ...], words: str) -> None:
    body = AWAITED.format(coming=[rank for rank in (1, 2) if rank not in absent]) + "go(timeout_seconds=5)"
    ended = ranks(HEAD + body, 3, tmp_path, absent=absent, deadline=60)
    assert len(ended) == 3 - len(absent)
    assert [one.code for one in ended] == [3] * len(ended)
    said = [message(one, "StartError") for one in ended]
    assert words in said[0]
    assert "5 s" in said[0]


SKIPPED = """
from subjects import CASES, images, tell
import paceline
from paceline.data.order import Order

data = images(100)
bad = Order(100, 32, 8, 0).microbatches_of(9)[6][1]
given = CASES["batch norm, dropout, short batch"]() | {"exact": True, "clip_norm": 1.0}

def train(nan, **more):
    inputs = data.tensors[0].clone()
    if nan:
        inputs[bad] = float("nan")
    def forward(model, microbatch):
        values, target = microbatch
        return torch.nn.functional.cross_entropy(model(values), target)
    session = paceline.start(**given | {"data": torch.utils.data.TensorDataset(inputs, data.tensors[1])} | more)
    reports = []
    for batch in session.batches(steps=12):
        if nan or not any(bad in part for part in session._context.order.microbatches_of(batch.step)):
            reports.append(session.step(batch))
    return session, reports

import torch
schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
session, reports = train(True, nonfinite="skip", schedule=schedule)
tell(skipped=[report.step for report in reports if not report.applied], position=session.position)
tell(nan=[report.step for report in reports if report.loss != report.loss], fingerprint=session.fingerprint())
given["model"] = CASES["batch norm, dropout, short batch"]()["model"]
session, reports = train(False, schedule=schedule)
tell(without=session.fingerprint(), steps=len(reports), rate=reports[-1].learning_rate)
"""


@pytest.mark.slow
def test_skipping_leaves_no_trace(printed: Printed, tmp_path: Path) -> None:
    """The state is that of a run which never saw the bad batches."""
    found = [one for workers in (1, 2, 3) for one in printed(SKIPPED, workers, tmp_path / str(workers))]
    for one in found:
        assert one == found[0]
        assert one["skipped"] == one["nan"]
        assert 9 in one["skipped"]
        assert one["position"] == 12
        assert one["fingerprint"] == one["without"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 256 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("left", [0, 20_000], ids=["nothing left", "a little left"])
def test_a_full_disk(ranks: Run, tmp_path: Path, small_disk: Path, left: int) -> None:
    """Saving fails with the reason, also in the middle; the checkpoint before stays and can be used."""
    given = f"checkpoint={{'directory': {str(small_disk)!r}, 'every': 2, 'background': False}}"
    body = f"""
session = paceline.start(**given, {given}, resume="auto")
for batch in session.batches(steps=8):
    if batch.step == 3 and RANK == 0 and "FILL" in os.environ:
        with open({str(small_disk / "filler")!r}, "wb") as file:
            file.write(bytes(os.statvfs({str(small_disk)!r}).f_bfree * 4096 - {left}))
    session.step(batch)
print("done at", session.position)
"""
    script = HEAD + body
    ended = ranks(script, 2, tmp_path, environment={"FILL": "1"}, deadline=60)
    assert ended[0].code == 4
    said = message(ended[0], "CheckpointError")
    assert said.startswith("The checkpoint of step 4 could not be written")
    assert "No space left on device" in said
    assert str(small_disk / "step-000002") in said
    assert ended[1].code == 5
    (small_disk / "filler").unlink()
    assert sorted(os.listdir(small_disk)) == ["latest", "step-000002"]
    for one in ranks(script, 2, tmp_path, deadline=60):
        assert one.code == 0, one.err
        assert "done at 8" in one.out
