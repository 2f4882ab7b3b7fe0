"""Scripts that Slurm's srun starts, on two nodes."""

import sys
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from training import alone, fingerprints, write_script

pytestmark = pytest.mark.timeout(600)
SRUN = ("srun", "-N", "2", "-n", "3", "-l", "-u", sys.executable)


def test_the_bits_of_one_process(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    said, _ = slurm.start(*SRUN, script, cwd=tmp_path).communicate(timeout=200)
    assert fingerprints(said) == 3 * [alone(script)], said


def test_a_killed_task_and_a_new_start(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    variables = {"SAVE": "1", "KILL": "1"}
    first = slurm.start(*SRUN, script, cwd=tmp_path, environment=variables)
    said, _ = first.communicate(timeout=200)
    assert first.returncode != 0
    assert "lost rank 1" in said, said
    again = slurm.start(*SRUN, script, cwd=tmp_path, environment=variables)
    said, _ = again.communicate(timeout=200)
    assert fingerprints(said) == 3 * [alone(script)], said
    assert "from step 6" in said, said


def test_a_batch_script_that_calls_python_alone(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    batch = tmp_path / "batch.sh"
    batch.write_text(f"#!/bin/sh\nexec {sys.executable} {script}\n")
    slurm.run("sbatch", "-N", "2", "-n", "4", "-o", str(tmp_path / "said"), "--wait", str(batch), timeout=200)
    assert "rank 0 of 1" in (tmp_path / "said").read_text()


def test_a_port_that_is_taken(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    taken = tmp_path / "taken.py"
    taken.write_text(
        "import os, runpy, socket, sys\n"
        "from paceline.environments import env\n"
        "if env.identity().rank == 0:\n"
        "    held = socket.create_server(('127.0.0.1', env.started_by().port))\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    ended = slurm.start("srun", "-n", "2", "-N", "2", "-K", sys.executable, taken, cwd=tmp_path)
    said, _ = ended.communicate(timeout=200)
    assert ended.returncode != 0
    assert "is in use by another process" in said and "MASTER_PORT" in said, said
