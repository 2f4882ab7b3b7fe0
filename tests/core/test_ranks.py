"""The helper of these tests that is shipped: real processes, killed when and where the test says."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from paceline.testing.ranks import Kill, Process, Worker, run, start_new

WAITING = """
import os, sys, time
rank = os.environ["RANK"]
print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
print("to stderr", file=sys.stderr)
time.sleep(0.05 if rank == os.environ.get("SHORT") else 60)
sys.exit(int(rank))
"""

NAMES = """
import os
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "MORE"):
    print(name, os.environ.get(name))
print([name for name in os.environ if name.startswith("PACELINE")], os.environ["MASTER_PORT"])
"""


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_is_killed_and_all_is_told(tmp_path: Path) -> None:
    kill = Kill("rank 1 of 3\n", ranks=(1,), by=1)
    ended = run(WAITING.replace("60", '60 if rank == "1" else 0.5'), 3, tmp_path, kill=kill, deadline=30)
    assert [one.code for one in ended] == [0, -signal.SIGKILL, 2]
    assert [one.signal for one in ended] == ["", "SIGKILL", ""]
    assert [one.out for one in ended] == [f"rank {rank} of 3\n" for rank in range(3)]
    assert ended[0].err == "to stderr\n"


def test_all_are_killed(tmp_path: Path) -> None:
    ended = run(WAITING, 2, tmp_path, kill=Kill("rank 0", signal=signal.SIGTERM), deadline=30)
    assert [one.signal for one in ended] == ["SIGTERM"] * 2


def test_who_is_late_is_ended_and_named(tmp_path: Path) -> None:
    def start(workers: list[Worker]) -> Sequence[Process]:
        """The deadline counts from the return."""
        processes = start_new(workers)
        until(lambda: processes[1].poll() is not None)
        until(lambda: all(workers[rank].out.read_text().endswith("\n") for rank in (0, 2)))
        return processes

    with pytest.raises(TimeoutError, match=r"Still running after 1 s: ranks 0, 2\.\n-- rank 0\nrank 0 of 3"):
        run(WAITING, 3, tmp_path, environment={"SHORT": "1"}, start=start, deadline=1)


def test_what_a_worker_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BATCH", "8")
    monkeypatch.setenv("WORLD_SIZE", "9")
    script = tmp_path / "names.py"
    script.write_text(NAMES)
    (last,) = run(script, 2, tmp_path, environment={"MORE": "yes"}, absent=(0,), one_machine=False)
    told = dict(line.split(maxsplit=1) for line in last.out.splitlines()[:-1])
    assert (told["RANK"], told["WORLD_SIZE"], told["MASTER_ADDR"], told["MORE"]) == ("1", "2", "127.0.0.1", "yes")
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert last.out.splitlines()[-1].startswith("[] ")
    assert os.environ["WORLD_SIZE"] == "9"


@pytest.mark.slow
def test_workers_that_start_without_a_warm_process(tmp_path: Path) -> None:
    """The usual way to start, from nothing."""
    script = """
import torch, paceline
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.long))
session = paceline.start(
    model=torch.nn.Linear(4, 2), data=data, batch=8, loss=torch.nn.functional.cross_entropy, optimizer=torch.optim.SGD
)
for batch in session.batches(epochs=1):
    session.step(batch)
print(session.fingerprint())
"""
    first, second = run(script, 2, tmp_path)
    assert (first.code, second.code) == (0, 0), first.err
    assert first.out == second.out
    assert len(first.out.strip()) == 64
