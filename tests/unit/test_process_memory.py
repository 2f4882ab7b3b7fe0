"""Memory of a process, and when the allocator keeps what is freed."""

from functools import partial
from pathlib import Path

import pytest
import torch

import paceline
from paceline.planning import budget
from paceline.step.probes.digests import Digests
from paceline.system.process_memory import process_memory


def test_freed_memory_still_counts_in_the_peak() -> None:
    size, before = 64 << 20, process_memory()
    block = bytearray(b"x") * size
    during = process_memory()
    del block
    after = process_memory()
    if before is None or during is None or after is None:
        pytest.skip("the system does not tell")
    assert during.held - before.held > 0.9 * size
    assert during.held - after.held > 0.9 * size
    assert after.peak > before.held + 0.9 * size


def test_a_digest_needs_little_memory() -> None:
    """An auditor makes it beside its share of the state, of each gradient."""
    digests, value = Digests(exact=False), torch.arange(1 << 23, dtype=torch.float32)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    except OSError:
        pytest.skip("the system does not tell")
    before = process_memory()
    digests.add("a", value)
    after = process_memory()
    assert before is not None and after is not None
    assert after.peak - before.held < value.nbytes / 2
    assert digests.found()["a"][2] == -(1 << 22)


def test_the_memory_of_large_tensors_is_kept_except_in_the_first_steps_and_in_audited_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = list[bool]()
    monkeypatch.setattr(budget, "keep_freed_pages", lambda large: kept.append(large))
    samples = torch.randn(40, 4)
    session = paceline.start(
        model=torch.nn.Linear(4, 4),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=torch.nn.functional.mse_loss,
        data=torch.utils.data.TensorDataset(samples, samples),
        batch=8,
    )
    for batch in session.batches(steps=7):
        session.step(batch)
    assert kept == [False, False, False, True, False, True, False]  # steps 4 and 6, the last one, are audited
