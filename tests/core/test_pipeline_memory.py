"""While a model that is cut trains, a worker keeps the weights and the optimizer's state of its own stages only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
import gc, json, os
from functools import partial
import torch
from pipeline_cases import CUT
from subjects import measure_alike, tell
import paceline

gc.disable()  # nothing waits for it
measure_alike()

def kept():
    state = [value for values in session._context.update.optimizer.state.values() for value in values.values()]
    tensors = [*model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
    return sum(value.untyped_storage().nbytes() for value in tensors)

given = CUT[os.environ["CASE"]]()
given |= {"optimizer": partial(torch.optim.Adam, lr=1e-3), "strategy": "pipeline", "timeout_seconds": 30}
model = given["model"]
session = paceline.start(**given, **json.loads(os.environ["GIVEN"]))
found = [kept()]
for batch in session.batches(steps=4):
    session.step(batch)
    found.append(kept())
    if batch.step == 1:
        session.evaluate(given["data"])
        found.append(kept())
stages = session._loop.strategy.stages
sizes = {name: 4 * parameter.numel() for name, parameter in model.named_parameters()}
used = {name for held in stages.local.values() for name in held.trained}
updated = {name for names in stages.updated.values() for name in names}
state = {name: 2 * size + 4 for name, size in sizes.items()}  # two moments, and what Adam counts for each tensor
tell(kept=found, whole=sum(sizes.values()), state=sum(state.values()), fingerprint=session.fingerprint(),
     used=sum(sizes[name] for name in used), updated=sum(state[name] for name in updated))
"""


@pytest.mark.promise(
    "docs/pipeline.md",
    "While it trains, a worker has the parameters, gradients and optimizer state of its own stages only; "
    "parameters of other stages keep their shape but have no values.",
)
@pytest.mark.crossed
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "pipedream"])
@pytest.mark.parametrize("case", ["batch norm", "tied weights"])
def test_no_worker_keeps_the_stages_of_others(printed: Printed, tmp_path: Path, case: str, schedule: str) -> None:
    exact = "true" if schedule != "pipedream" else "false"
    given = f'{{"exact": {exact}, "pipeline": {{"schedule": "{schedule}"}}}}'
    everyone = printed(SCRIPT, 2, tmp_path, environment={"CASE": case, "GIVEN": given})
    assert sum(one["updated"] for one in everyone) == everyone[0]["state"]
    for one in everyone:
        assert one["used"] < one["whole"]
        part = one["used"] + one["updated"]
        first, *steps, evaluated, third, last = one["kept"]
        assert (first, evaluated, third, last) == (one["whole"], one["whole"] + one["state"], part, part)
        assert max(steps) == part  # PipeDream has not made an update yet after the first step
    assert everyone[0]["fingerprint"] == everyone[1]["fingerprint"]
