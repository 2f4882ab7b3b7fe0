"""Commands beside ``paceline run``, collectives by hand, and scripts written for Horovod."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from launching import launch
from patience import DEADLINE

SCRIPT = """
from functools import partial
import torch
import paceline

torch.manual_seed(0)
inputs = torch.randn(64, 8)
session = paceline.start(
    model=torch.nn.Linear(8, 1),
    optimizer=partial(torch.optim.AdamW, lr=0.01),
    loss=torch.nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)),
    batch=16,
    exact=SETTING,
    checkpoint={"directory": FOLDER},
)
for batch in session.batches(steps=4):
    session.step(batch)
session.save()
session.export(FOLDER + "/of the session.pt")
print("fingerprint", session.fingerprint())
"""
EXAMPLES = Path(__file__).parents[2] / "examples" / "collectives"
Paceline = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("commands")
    for name, setting in (("train.py", "False"), ("same.py", "True")):
        (made / name).write_text(SCRIPT.replace("SETTING", setting).replace("FOLDER", repr(str(made / "saved"))))
    return made


@pytest.fixture(scope="module")
def paceline(fork_server: ForkServer, folder: Path) -> Paceline:
    """Run a command, and return its exit code and what it printed."""

    def run(*words: object, **variables: str) -> tuple[int, str]:
        return launch(fork_server, list(map(str, words)), folder, DEADLINE, **variables)

    return run


@pytest.fixture(scope="module")
def verified(paceline: Paceline) -> dict[str, tuple[int, str]]:
    """What ``paceline verify`` says of a script with and without ``exact``."""
    words = "verify", "--workers", "1,3", "--steps", "2"
    return {name: paceline(*words, name) for name in ("train.py", "same.py")}


@pytest.mark.promise(
    "README.md",
    "`paceline verify train.py` trains your own script for some steps on 1, 2, 3 and 4 workers, compares everything "
    "that was computed, and says why two runs differ.",
)
def test_verify_finds_rounding(verified: Any) -> None:
    code, said = verified["train.py"]
    assert code == 0 and "3        rounding" in said, said
    assert "3 workers: the bits first differ in" in said and "`--set exact=true` gives the same bits." in said, said


@pytest.mark.promise(
    "docs/verify.md", "The exit code is 0 if all sizes train the same: up to rounding or, with `exact`"
)
def test_verify_finds_the_same_bits(verified: Any) -> None:
    code, said = verified["same.py"]
    assert code == 0 and "3        identical" in said, said


@pytest.mark.promise(
    "docs/verify.md", "in a temporary directory that is removed afterwards.", "`checkpoint` and `resume` have"
)
def test_verify_leaves_nothing(verified: Any, folder: Path) -> None:
    assert verified and not (folder / "runs").exists()


@pytest.fixture(scope="module")
def configured(paceline: Paceline, folder: Path) -> str:
    (folder / "plan.toml").write_text("batch = 16\nseed = 5\nmicrobatches = 4\n")
    words = "--plan", "plan.toml", "--set", "batch=128", "same.py"
    code, said = paceline("config", *words, PACELINE_BATCH="48", PACELINE_SEED="3", COLUMNS="200")
    assert code == 0, said
    return said


@pytest.mark.promise("docs/launch.md", "The first one that names it wins")
def test_where_settings_come_from(configured: str) -> None:
    rows = {words[0]: words[1:3] for words in map(str.split, configured.splitlines()) if len(words) > 2}
    assert rows["batch"] == ["128", "command"]
    assert rows["seed"] == ["3", "environment"]
    assert rows["microbatches"] == ["4", "plan"]
    assert rows["exact"][0] == "true" and rows["strategy"] == ["allreduce", "default"]


@pytest.mark.promise("docs/launch.md", "The script runs up to `paceline.start` and no further")
def test_config_starts_no_training(configured: str) -> None:
    assert "fingerprint" not in configured


@pytest.mark.promise(
    "paceline/cli/export.py", "The file is the same as one by session.export() after the step of the checkpoint."
)
def test_export(paceline: Paceline, folder: Path) -> None:
    import torch

    code, said = paceline("run", "--quiet", "-n", "1", "same.py")
    assert code == 0, said
    code, said = paceline("export", "saved", "exported.pt")
    assert code == 0, said
    found, wanted = (
        torch.load(folder / name, weights_only=True) for name in ("exported.pt", "saved/of the session.pt")
    )
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def examined(paceline: Paceline, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """What the doctor finds where the script is missing."""
    code, said = paceline("doctor", "--json", "-n", "2", "missing.py")
    found = json.loads(said[said.index("[") if said.lstrip().startswith("[") else said.index("{") :])
    return code, found if isinstance(found, list) else found["findings"]


@pytest.mark.promise("docs/doctor.md", "says of each what it found, why it matters and what to do.")
def test_the_doctor_says_what_to_do(examined: Any) -> None:
    code, findings = examined
    wrong = [one for one in findings if one["status"] == "failure"]
    assert code == 1 and any(one["check"] == "script" for one in wrong), findings
    assert all(one["why"] and one["cure"] for one in wrong)


@pytest.mark.promise("docs/collectives.md", "What each has afterwards, on three ranks that begin with 1, 2, 3:")
def test_collectives_by_hand(paceline: Paceline) -> None:
    code, said = paceline("run", "-n", 3, EXAMPLES / "operations.py")
    assert code == 0, said
    words = " ".join(said.split())
    assert "reduce_scatter [3] [33] [63]" in words, said
    assert "all_to_all [0, 10, 20] [1, 11, 21] [2, 12, 22]" in words, said


@pytest.mark.promise(
    "docs/collective-calls.md",
    "Paceline compares the calls and raises a `DisagreementError` instead, before the next update",
)
@pytest.mark.promise(
    "docs/collectives.md",
    "the run ends at once with exit code 3, and the error names what each rank called, and in which line.",
)
def test_a_collective_that_one_rank_leaves_out(paceline: Paceline) -> None:
    code, said = paceline("run", "-n", 2, EXAMPLES / "with_session.py", FORGET="1")
    assert code == 3, said
    assert "all_reduce" in said and "with_session.py:" in said and "rank 1" in said, said


HOROVOD = """
import torch
import paceline.horovod.torch as hvd
from subjects import mlp, tell

hvd.init()
rank, size = hvd.rank(), hvd.size()
mean = hvd.allreduce(torch.tensor([rank + 1.0, 4.0]), name="mean").tolist()
rows = hvd.allgather(torch.full((rank + 1, 1), float(rank))).flatten().tolist()
sent = hvd.broadcast(torch.tensor([rank]), root_rank=1).item()
first, second = (torch.tensor([float(rank + add)]) for add in (0, 10))
handles = {name: hvd.allreduce_async(value, name=name, op=hvd.Sum) for name, value in
           ([("a", first), ("b", second)] if rank else [("b", second), ("a", first)])}
sums = {name: hvd.synchronize(handle).item() for name, handle in sorted(handles.items())}

torch.manual_seed(rank)
model = mlp() if rank == 0 else torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
before = [value.clone() for value in model.parameters()]
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
weights = [value.clone() for value in model.parameters()]
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
kept = all(torch.equal(old, new) for old, new in zip(weights, model.parameters()))
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 12), float(rank + step))).square().mean().backward()
    optimizer.step()
value = sum(value.double().sum().item() for value in model.parameters())
try:
    hvd.allreduce(torch.zeros(17 + rank), name="x")
    error = ""
except Exception as failed:
    error = str(failed)
tell(mean=mean, rows=rows, sent=sent, sums=sums, kept=kept, value=value, error=error)
hvd.shutdown()
"""


@pytest.fixture(scope="module")
def horovod(reported: Any) -> list[dict[str, Any]]:
    return reported(HOROVOD, 2)


@pytest.mark.promise("docs/horovod.md", "Operations are matched by name, whatever the order in which ranks submit them")
def test_the_operations_of_horovod(horovod: Any) -> None:
    for one in horovod:
        assert (one["mean"], one["rows"], one["sent"]) == ([1.5, 4.0], [0.0, 1.0, 1.0], 1)
        assert one["sums"] == {"a": 1.0, "b": 21.0}


@pytest.mark.promise("docs/horovod.md", "**`broadcast_optimizer_state` takes no step.**")
def test_the_state_of_an_optimizer_of_horovod(horovod: Any) -> None:
    assert all(one["kept"] for one in horovod)


@pytest.mark.promise(
    "docs/horovod.md", "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
)
def test_the_optimizer_of_horovod(horovod: Any) -> None:
    assert horovod[0]["value"] == horovod[1]["value"]


@pytest.mark.promise(
    "docs/horovod.md",
    "**What differs is an error on all ranks**, and says how: `allreduce 'x' differs in its shape: [17] on rank 0, "
    "[18] on rank 1`.",
)
def test_operations_of_horovod_that_differ(horovod: Any) -> None:
    for one in horovod:
        assert all(word in one["error"] for word in ("differs in its shape", "[17] on rank 0", "[18] on rank 1")), (
            horovod
        )
