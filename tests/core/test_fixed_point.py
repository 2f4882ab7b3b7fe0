"""``exact="fixed-point"``: steps whose gradients do not fit, and checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

# A gradient grows by far more than is foreseen at step 4, of one microbatch only.
JUMP = """
import os
from functools import partial
import torch
import paceline
from subjects import tell

torch.manual_seed(0)
inputs = torch.randn(96, 6)
inputs[BAD] = VALUE
session = paceline.start(
    model=torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    optimizer=partial(torch.optim.SGD, lr=0.01),
    loss=torch.nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(inputs, torch.where(inputs[:, :1].abs() < 100, inputs[:, :1], 1e5)),
    batch=16,
    clip_norm=1.0,
    exact="fixed-point",
    nonfinite="skip",
)
reports = [session.step(batch) for batch in session.batches(steps=10)]
tell(losses=[str(report.loss) for report in reports], fingerprint=session.fingerprint())
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("machines", [(1,), (3,), (1, 1)], ids=str)
@pytest.mark.parametrize(("value", "repeated"), [("0.5", 1), ("1e5", 2), ("float('nan')", 1)])
def test_a_step_is_repeated_if_a_gradient_does_not_fit(
    printed: Printed, tmp_path: Path, machines: tuple[int, ...], value: str, repeated: int
) -> None:
    script = JUMP.replace("BAD", "41").replace("VALUE", value)
    (alone,) = printed(script, 1, tmp_path / "alone")
    environment = {"PACELINE_RUN": str(tmp_path / "run")}
    everyone = printed(script, sum(machines), tmp_path, machines=machines, environment=environment)
    assert all(one == alone for one in everyone)
    for rank in range(sum(machines)):
        lines = (tmp_path / "run" / "events" / f"rank-{rank}.jsonl").read_text().splitlines()
        assert sum(json.loads(line)["event"] == "repeated" for line in lines) == repeated
    assert ("nan" in alone["losses"]) == ("nan" in value)


RESUMED = """
import os
from subjects import CASES, tell
import paceline
given = CASES["transformer, tied weights, clipping, schedule"]()
given |= {"resume": "auto", "checkpoint": {"directory": os.environ["SAVED"], "every": 4}} | eval(os.environ["GIVEN"])
session = paceline.start(**given)
for batch in session.batches(steps=int(os.environ["STEPS"])):
    session.step(batch)
tell(fingerprint=session.fingerprint(), position=session.position)
"""


@pytest.mark.slow
def test_a_checkpoint_has_the_units(printed: Printed, ranks: Any, tmp_path: Path) -> None:
    """A run that goes on with other workers ends with the same bits; with sums along the tree it is refused."""

    def environment(steps: int, exact: object = "fixed-point", place: str = "here") -> dict[str, str]:
        return {"GIVEN": repr({"exact": exact}), "STEPS": str(steps), "SAVED": str(tmp_path / place)}

    (whole,) = printed(RESUMED, 1, tmp_path, environment=environment(20, place="elsewhere"))
    printed(RESUMED, 3, tmp_path, environment=environment(8))
    for one in ranks(RESUMED, 2, tmp_path, environment=environment(20, exact=True)):
        assert one.code != 0
        assert "cannot be resumed with the same bits: exact" in one.err
        assert "fixed-point" in one.err
    assert printed(RESUMED, 2, tmp_path, environment=environment(12))[0]["position"] == 12
    assert printed(RESUMED, 1, tmp_path, environment=environment(16))[0]["position"] == 16
    for one in printed(RESUMED, 5, tmp_path, environment=environment(20)):
        assert one == whole
