"""Runs that Slurm gives their nodes: ``paceline run`` in an allocation, and ``paceline run --on slurm``."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from training import alone

RUN = (sys.executable, "-m", "paceline", "run", "--runs-dir", "runs")
SUBMIT = (*RUN, "--on", "slurm", "--name", "one")
HEAD = """
import os, signal, time
from functools import partial
from pathlib import Path
import torch
import paceline

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(240, 4), torch.randn(240, 1))
session = paceline.start(
    model=torch.nn.Linear(4, 1), optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.mse_loss,
    data=data, batch=12, exact=True,
)
node = os.environ.get("SLURMD_NODENAME")
for step, batch in enumerate(session.batches(epochs=1)):
    session.step(batch)
"""
KILL_ONE = """
    if step == 5 and session.rank == 1 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
WAIT_FOR_LOSS = """
    while node and session.workers == 1 and not Path("lost").exists() and not session._context.world.notice():
        time.sleep(0.05)  # until the other node joins, which it does after the next step
    if node and not Path("lost").exists() and session.workers == 2:
        Path(f"new-{os.environ['PACELINE_WORKER']}").write_text(node)
        Path(f"new-{os.environ['PACELINE_WORKER']}").rename(f"node-of-{os.environ['PACELINE_WORKER']}")
        while not Path("lost").exists():
            time.sleep(0.05)
"""
WAIT_FOR_NOTICE = """
    if node and "SLURM_RESTART_COUNT" not in os.environ:
        print("is training", flush=True)
        while step == 3 and not session._context.world.notice():
            time.sleep(0.05)
"""
TAIL = """
print("fingerprint", session.fingerprint())
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes train.py with something that happens in its loop, and gives the fingerprint of one process."""

    def write(happens: str) -> str:
        (tmp_path / "plain.py").write_text(HEAD + TAIL)
        (tmp_path / "train.py").write_text(HEAD + happens + TAIL)
        return alone(tmp_path / "plain.py")

    return write


def until(process: subprocess.Popen[str], pattern: str) -> str:
    """Read what a process prints until a line has this."""
    assert process.stdout is not None
    read = []
    for line in process.stdout:
        read.append(line)
        if re.search(pattern, line):
            return "".join(read)
    raise AssertionError(f"{pattern!r} did not come:\n{''.join(read)}")


def test_in_an_allocation_a_killed_worker_is_replaced(
    slurm: SlurmCluster, script: Callable[[str], str], tmp_path: Path
) -> None:
    expected = script(KILL_ONE)
    process = slurm.start("salloc", "--nodes=2", *RUN, "train.py", cwd=tmp_path)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert (tmp_path / "killed").exists()
    assert re.search(r"--on slurm: Slurm's job \d+ has 2 nodes", said) and expected in said


def test_the_others_survive_a_lost_node(slurm: SlurmCluster, script: Callable[[str], str], tmp_path: Path) -> None:
    expected = script(WAIT_FOR_LOSS)
    process = slurm.start("salloc", "--nodes=2", "--no-kill", *RUN, "--nodes", "1:2", "train.py", cwd=tmp_path)
    slurm.wait_for((tmp_path / "node-of-1000").exists, "the worker of the second agent")
    slurm.wait_for((tmp_path / "node-of-0").exists, "the worker of the first agent")
    slurm.lose_node((tmp_path / "node-of-1000").read_text())  # the coordinator is with the first agent
    (tmp_path / "lost").touch()
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert expected in said


def test_a_job_whose_time_is_up_comes_back(slurm: SlurmCluster, script: Callable[[str], str], tmp_path: Path) -> None:
    expected = script(WAIT_FOR_NOTICE)
    process = slurm.start(*SUBMIT, "--nodes", "2", "train.py", cwd=tmp_path)
    said = until(process, "is training")
    slurm.run("scancel", "--batch", "--signal=USR1", "1")
    said += process.communicate()[0]
    assert process.returncode == 0, said
    assert "job 1 runs on n[1-2]" in said and "is queued again" in said and expected in said
    assert list((tmp_path / "runs" / "one" / "checkpoints").glob("step-*"))


def test_ctrl_c_saves_and_ends_the_job(slurm: SlurmCluster, script: Callable[[str], str], tmp_path: Path) -> None:
    script(WAIT_FOR_NOTICE)
    process = slurm.start(*SUBMIT, "train.py", cwd=tmp_path)
    said = until(process, "is training")
    process.send_signal(signal.SIGINT)
    said += process.communicate()[0]
    assert process.returncode == 128 + signal.SIGINT, said
    assert list((tmp_path / "runs" / "one" / "checkpoints").glob("step-*")), said
    assert slurm.run("squeue", "-h") == ""


def test_wrong_use(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    process = slurm.start(*SUBMIT, "--partition", "nope", "train.py", cwd=tmp_path)
    said = process.communicate()[0]
    assert process.returncode == 3 and "Invalid partition name" in said and "The partitions are: low, high." in said
    assert not (tmp_path / "runs" / "one").exists()

    process = slurm.start(*SUBMIT, "--nodes", "3", "train.py", cwd=tmp_path)
    said = until(process, r"job 1 waits: \w+")  # root may ask for more than there is
    slurm.run("scancel", "1")
    said += process.communicate()[0]
    assert process.returncode == 143 and "job 1 has ended: CANCELLED" in said


def test_a_preempted_job_comes_back(slurm: SlurmCluster, script: Callable[[str], str], tmp_path: Path) -> None:
    expected = script(WAIT_FOR_NOTICE)
    process = slurm.start(*SUBMIT, "--nodes", "2", "train.py", cwd=tmp_path)
    said = until(process, "is training")
    other = slurm.start("srun", "--partition=high", "--nodes=2", "--exclusive", "true", cwd=tmp_path)
    said += process.communicate()[0]
    assert process.returncode == 0, said
    assert other.wait(60) == 0
    assert "is queued again" in said and expected in said


def test_a_failed_node_queues_the_job_again(slurm: SlurmCluster, script: Callable[[str], str], tmp_path: Path) -> None:
    expected = script(WAIT_FOR_LOSS)
    process = slurm.start(*SUBMIT, "--nodes", "2", "--set", "checkpoint.every=2", "train.py", cwd=tmp_path)
    slurm.wait_for((tmp_path / "node-of-1000").exists, "the worker of the second agent")
    slurm.wait_for((tmp_path / "node-of-0").exists, "the worker of the first agent")
    lost = (tmp_path / "node-of-1000").read_text()
    slurm.lose_node(lost)
    (tmp_path / "lost").touch()
    said = until(process, "is queued again|has ended")
    slurm.start_node(lost)
    said += process.communicate()[0]
    assert process.returncode == 0, said
    assert expected in said
