"""Steps of real runs again: the recorded bits, a NaN, the samples, and where two runs begin to differ."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Result, Run

from paceline.testing import faults

SCRIPT = """
import sys
from functools import partial
import torch, paceline

class Scaled(torch.nn.Module):
    def forward(self, values):
        return values / values.pow(2).sum(1, keepdim=True).sqrt()

strategy, changed = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
inputs = torch.randn(64, 8)
inputs[13] = 0.0 if strategy == "single" else inputs[13]
layers = [torch.nn.Linear(8, 8, bias=False), Scaled(), torch.nn.Linear(8, 8), torch.nn.Dropout(0.1)]
layers.append(torch.nn.Linear(8, 1))
session = paceline.start(
    model=torch.nn.Sequential(*layers), optimizer=partial(torch.optim.AdamW, lr=0.01),
    loss=torch.nn.functional.mse_loss, data=torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)),
    batch=16, strategy=strategy, exact=True, nonfinite="skip", audit="off",
)
for batch in session.batches(steps=10):
    if batch.step == changed:
        layers[2].weight.data[0, 0] += 0.1
    session.step(batch)
    if batch.step == 4:
        session.export("weights.pt")
open("ended", "a").write("once\\n")
"""

Command = Callable[..., Result]


def files_in(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "tmp" and path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["stealing", "pipeline"])
def test_a_step_of_a_run_that_has_lost_a_worker(
    run: Run, forked_paceline: Command, tmp_path: Path, strategy: str
) -> None:
    words = ("-n", 2, "--elastic", "1:2", "--set", "checkpoint.every=3", "--set", "seed=3")
    ran = run(SCRIPT, *words, arguments=(strategy, -1), faults=faults.kill(rank=1, step=4))
    assert ran.code == 0, ran.report()
    before = files_in(tmp_path)
    for step, begin in ((5, "the start"), (8, "step-000006")):
        result = forked_paceline("replay", "one", "--step", step)
        assert f"step {step}: the same bits as recorded" in result.out, result
        assert f"from {begin} on 1 worker" in result.err
        assert result.code == 0
    assert {path: time for path, time in files_in(tmp_path).items() if not path.name.startswith("command.")} == before
    for events in (ran.run / "events").glob("rank-*.jsonl"):  # of the worker that has joined, too
        records = [json.loads(line) for line in events.read_text().splitlines()]
        for one in records:
            if one["event"] == "step" and one["step"] == 7:
                one["loss"] += 1e-12
        events.write_text("".join(json.dumps(one) + "\n" for one in records))
    result = forked_paceline("replay", "one", "--step", 8)
    assert "step 7: recorded and replayed differ in the loss" in result.out
    assert result.code == 1


@pytest.mark.slow
def test_a_nan_the_samples_and_where_two_runs_part(run: Run, forked_paceline: Command) -> None:
    ran = run(SCRIPT, "-n", 1, arguments=("single", -1))
    losses = {one["step"]: one["loss"] for one in ran.events("rank-0") if one["event"] == "step"}
    step = next(step for step, loss in losses.items() if loss != loss)
    result = forked_paceline("replay", "one", "--step", step, "--anomaly")
    assert f"step {step}, sample 13 (microbatch " in result.out, result
    assert "not finite in the forward pass, layer 1 (Scaled)" in result.out
    assert result.code == 0

    result = forked_paceline("replay", "one", "--step", step + 1, "--samples")
    header, *rows, _ = result.out.splitlines()
    found = [float(row.split()[2]) for row in rows]
    assert (header.split(), len(found)) == (["sample", "microbatch", "loss"], 16)
    assert found == sorted(found, reverse=True)
    assert sum(found) / 16 == pytest.approx(losses[step + 1], rel=1e-5)

    run(SCRIPT, "-n", 1, arguments=("single", 7), name="two")
    result = forked_paceline("verify", "one", "two")
    assert "The records differ from step 7 on" in result.out, result
    assert "The first value that differs before step 7 is the parameter 2.weight" in result.out
    assert result.code == 1
