"""Processors that compute other bits, under the same name of instruction set: refused with ``exact``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fork_server import forked

from paceline.testing.ranks import Process, Worker, run, start_new

OTHER_BITS = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
SHOW = """
import torch
from paceline.step.numerics import canary
print(torch.backends.cpu.get_cpu_capability(), canary())
"""
SCRIPT = """
import os
from functools import partial
import torch
import paceline

torch.manual_seed(0)
session = paceline.start(
    model=torch.nn.Linear(4, 1), optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch=8,
    exact=os.environ["EXACT"] == "1", checkpoint={"directory": "saved", "every": 2}, resume="auto",
)
for batch in session.batches(steps=4):
    session.step(batch)
"""


def second_is_other(workers: list[Worker]) -> Sequence[Process]:
    """Only a new process has other bits: torch looks at these variables when it is imported."""
    workers[1].environment.update(OTHER_BITS)
    return [*forked(workers[:1]), *start_new(workers[1:])]


@pytest.fixture(scope="module", autouse=True)
def there_are_other_bits(fork_server: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Some processors have no other kernels to choose."""
    shown = [one.out.split() for one in run(SHOW, 2, tmp_path_factory.mktemp("shown"), start=second_is_other)]
    if shown[0][0] != shown[1][0] or shown[0][1] == shown[1][1]:
        pytest.skip(f"these variables change no bits here: {shown}")


@pytest.mark.slow
@pytest.mark.parametrize("exact", ["0", "1"])
def test_among_workers(tmp_path: Path, exact: str) -> None:
    environment = {"EXACT": exact, "TMPDIR": str(tmp_path)}
    script = SCRIPT.replace('"saved"', repr(str(tmp_path / "saved")))
    for one in run(script, 2, tmp_path, environment=environment, start=second_is_other):
        if exact == "0":
            assert one.code == 0, one.err
        else:
            assert one.code == 3, one.err
            assert "The workers do not agree on canary of the processor: rank 0: " in one.err
            assert "MKL_CBWR" in one.err


@pytest.mark.slow
def test_on_resume(tmp_path: Path) -> None:
    script = SCRIPT.replace('"saved"', repr(str(tmp_path / "saved")))

    def alone(start: Any = start_new, **more: str) -> Any:
        (one,) = run(script, 1, tmp_path, environment={"EXACT": "1", **more}, start=start)
        return one

    assert alone(forked).code == 0
    again = alone(**OTHER_BITS)
    assert again.code != 0 and "cannot be resumed with the same bits: canary was" in again.err
    assert alone().code == 0
