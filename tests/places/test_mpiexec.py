"""Scripts that mpiexec starts on one machine, without an address or a port."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import until
from mpi_engines import CLEAN, run
from training import SCRIPT, alone, fingerprints, waiting_script, write_script

ENGINES = {
    "Open MPI": ("mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    "MPICH": ("mpiexec.hydra",),
}


@pytest.fixture(params=ENGINES)
def mpiexec(request: pytest.FixtureRequest) -> tuple[str, ...]:
    command = ENGINES[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}: apt-get install openmpi-bin mpich")
    return command


@pytest.mark.timeout(600)
def test_the_bits_of_one_process_after_a_kill(mpiexec: tuple[str, ...], tmp_path: Path) -> None:
    script = write_script(tmp_path)
    code, said = run(mpiexec, 2, script, SAVE="1", KILL="1")
    assert (tmp_path / "killed").exists(), said
    assert code != 0 and not fingerprints(said), said
    code, said = run(mpiexec, 2, script, SAVE="1", KILL="1")
    assert (code, fingerprints(said)) == (0, 2 * [alone(script)]), said
    assert "from step 6" in said, said


class Run:
    """A run of two workers by ``--on mpi``, in a session of its own.

    Args:
        engine: the name of mpiexec.
        script: what is run; all that belongs to the run has its path on the command line.
    """

    def __init__(self, engine: str, script: Path) -> None:
        self._script = script
        programs = script.parent / "programs"
        programs.mkdir(exist_ok=True)
        (programs / "mpiexec").write_text(f'#!/bin/sh\nexec {shutil.which(engine)} "$@"\n')
        (programs / "mpiexec").chmod(0o755)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "run", "--on", "mpi", "-n", "2", "--name", "one", script],
            cwd=script.parent,
            env={**CLEAN, "PATH": f"{programs}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pids(self) -> list[int]:
        """All processes of the run."""
        found = subprocess.run(["pgrep", "-f", str(self._script)], capture_output=True, text=True, check=False).stdout
        return [int(pid) for pid in found.split()]


@pytest.fixture
def started(mpiexec: tuple[str, ...]) -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for one in runs:
        one.process.kill()
        one.process.communicate()
        until(lambda one=one: not one.pids())


def test_a_killed_worker_is_replaced(mpiexec: tuple[str, ...], started: list[Run], tmp_path: Path) -> None:
    script = write_script(tmp_path)
    expected = alone(script)
    script.write_text("import os\nos.environ['KILL'] = '1'\n" + SCRIPT)
    started.append(run := Run(mpiexec[0], script))
    said, _ = run.process.communicate(timeout=250)
    assert (run.process.returncode, fingerprints(said)) == (0, [expected]), said
    assert (tmp_path / "killed").exists()
    until(lambda: not run.pids(), 120)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_launcher_is_told_to_end(
    mpiexec: tuple[str, ...], number: signal.Signals, started: list[Run], tmp_path: Path
) -> None:
    """After a checkpoint, or at once; nothing is left."""
    script, _ = waiting_script(tmp_path, 2)
    started.append(run := Run(mpiexec[0], script))
    until(lambda: run.process.poll() is not None or len(list(tmp_path.glob("reached-*"))) == 2, 120)
    run.process.send_signal(number)
    said, _ = run.process.communicate(timeout=120)
    assert run.process.returncode == (75 if number == signal.SIGTERM else -number), said
    assert list(tmp_path.glob("runs/one/checkpoints/step-*/")) or number == signal.SIGKILL, said
    until(lambda: not run.pids(), 120)
