"""Scripts that mpiexec starts on one machine, without an address or a port."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from training import alone, fingerprints, write_script

ENGINES = {
    "Open MPI": ("mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    "MPICH": ("mpiexec.hydra",),
}
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}


@pytest.fixture(params=ENGINES)
def mpiexec(request: pytest.FixtureRequest) -> tuple[str, ...]:
    command = ENGINES[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}: apt-get install openmpi-bin mpich")
    return command


def train(mpiexec: tuple[str, ...], script: Path, **variables: str) -> tuple[int, str]:
    process = subprocess.Popen(
        [*mpiexec, "-n", "3", sys.executable, script],
        cwd=script.parent,
        env={**CLEAN, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=250)
    except BaseException:
        process.terminate()  # it ends its processes; killed, it would leave them
        process.communicate(timeout=60)
        raise
    return process.returncode, said


@pytest.mark.timeout(600)
def test_the_bits_of_one_process_after_a_kill(mpiexec: tuple[str, ...], tmp_path: Path) -> None:
    script = write_script(tmp_path)
    code, said = train(mpiexec, script, SAVE="1", KILL="1")
    assert (tmp_path / "killed").exists(), said
    assert code != 0 and not fingerprints(said), said
    code, said = train(mpiexec, script, SAVE="1", KILL="1")
    assert (code, fingerprints(said)) == (0, 3 * [alone(script)]), said
    assert "from step 6" in said, said
