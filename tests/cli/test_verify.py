from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Script = Callable[..., Path]
Paceline = Callable[..., Any]

TRACES = """
workers, bug = int(os.environ["WORLD_SIZE"]), sys.argv[1:]
shift = {"none": 0.0, "rounding": 1e-7, "wrong": 0.5}[bug[0]] * (workers - 1)
def tensor(value):
    return [f"{hash((value,)) & (2**64 - 1):016x}", abs(value), value]
if rank == 0:
    with open(os.environ["PACELINE_TRACE"] + "/trace.jsonl", "w") as file:
        head = {"step": -1, "state": {"parameter/w": tensor(1.0)}, "epsilon": 2.0**-23, "threads": 1}
        head |= {"exact": "exact" in bug, "batch": 8}
        print(json.dumps(head), file=file)
        for step in range(int(os.environ["PACELINE_TRACE_STEPS"])):
            value = 1.0 / (step + 1) + shift
            print(json.dumps({"step": step, "loss": value, "samples": 8, "learning_rate": 0.1,
                "gradient": {"w": tensor(value)}, "state": {"parameter/w": tensor(value)}}), file=file)
"""


def results(out: str) -> list[str]:
    rows = out.split("\n\n")[0].splitlines()
    assert rows[0].split() == ["workers", "result", "fingerprint", "seconds"]
    return [" ".join(row.split()[:2]) for row in rows[1:]]


@pytest.mark.promise(
    "docs/verify.md", "in a temporary directory that is removed afterwards.", "`checkpoint` and `resume` have"
)
def test_identical(paceline: Paceline, script: Script, tmp_path: Path) -> None:
    result = paceline("verify", script(TRACES), "--workers", "1,2", "--steps", 3, "--", "none")
    assert result.code == 0
    assert results(result.out) == ["1 reference", "2 identical"]
    assert "The same bits in 3 steps at every size." in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


DIVIDED = """
import torch, paceline
torch.manual_seed(0)
inputs = torch.randn(64, 8)
session = paceline.start(
    model=torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1)),
    optimizer=torch.optim.AdamW, loss=torch.nn.functional.mse_loss, batch=32, exact=True, strategy=sys.argv[1],
    data=torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)),
    **({"pipeline": {"stages": 2}} if sys.argv[1] == "pipeline" else {}),
)
for batch in session.batches(epochs=1):
    session.step(batch)
"""


@pytest.mark.promise(
    "docs/verify.md", "The exit code is 0 if all sizes train the same: up to rounding or, with `exact`"
)
@pytest.mark.parametrize("strategy", ["sharded", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_a_state_that_the_workers_divide(forked_paceline: Paceline, script: Script, strategy: str) -> None:
    result = forked_paceline("verify", script(DIVIDED), "--workers", "1,2", "--steps", 2, "--", strategy)
    assert results(result.out) == ["1 reference", "2 identical"], result.out
    assert result.code == 0


@pytest.mark.parametrize(("arguments", "code"), [(["rounding"], 0), (["rounding", "exact"], 1)])
def test_rounding(paceline: Paceline, script: Script, arguments: list[str], code: int) -> None:
    result = paceline("verify", "--workers", "1,2,3", "--steps", 4, script(TRACES), *arguments)
    assert result.code == code
    assert results(result.out) == ["1 reference", "2 rounding", "3 rounding"]
    assert "the bits first differ in the loss of step 0" in result.out


def test_different(paceline: Paceline, script: Script) -> None:
    result = paceline("verify", "--workers=2,1", script(TRACES), "wrong", "--steps=2")
    assert result.code == 1
    assert results(result.out) == ["2 reference", "1 different"]
    assert "more than rounding in the loss of step 0 (1.5 against 1.0)" in result.out
    assert "the forward pass depends on the worker that computes it" in result.out


def test_the_scripts_own_options_pass_through(paceline: Paceline, script: Script) -> None:
    path = script("print(sys.argv[1:]); sys.exit(9)")
    result = paceline("verify", path, "--lr", "0.1", "--workers", "1,2", "--", "--steps", "5")
    assert result.code == 9
    assert "['--lr', '0.1', '--steps', '5']" in result.err


def test_a_script_that_records_nothing(paceline: Paceline, script: Script) -> None:
    result = paceline("verify", script("print('hello')"), "--workers", "1,2")
    assert result.code == 2
    assert "must call paceline.start" in result.err


@pytest.mark.parametrize(
    "options",
    [["--workers", "1"], ["--workers", "0,1"], ["--workers", "a"], ["--steps", "0"], ["--set", "x=1"]],
)
def test_wrong_usage(paceline: Paceline, script: Script, options: list[str]) -> None:
    assert paceline("verify", *options, script(TRACES)).code == 2
