"""MPI as a back end of torch.distributed, and as the transport of sessions, under each mpiexec."""

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi_engines import CLEAN, run
from training import SCRIPT, alone, fingerprints, write_script

pytest.importorskip("mpi4py", reason="needs mpi4py: pip install 'paceline[mpi]'")

ENGINES = {
    "Open MPI": ("mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    "MPICH": ("mpiexec.hydra",),
}
DEBIAN_MPICH = Path("/usr/lib/x86_64-linux-gnu/libmpich.so.12")
STRATEGIES = "allreduce", "stealing", "pipeline"


@pytest.fixture(scope="module", params=ENGINES)
def mpiexec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    command = ENGINES[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}: apt-get install openmpi-bin mpich")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "MPICH" and DEBIAN_MPICH.exists():
            links = tmp_path_factory.mktemp("links")
            (links / "libmpi.so.12").symlink_to(DEBIAN_MPICH)
            patch.setitem(CLEAN, "LD_LIBRARY_PATH", str(links))
        yield command


def test_every_operation(mpiexec: tuple[str, ...]) -> None:
    """Collectives, sends and receives, groups, DDP and FSDP2, each against what it must give."""
    code, said = run(mpiexec, 3, Path(__file__).with_name("mpi_operations.py"))
    assert (code, said.count("all operations")) == (0, 3), said


def test_the_bits_of_one_process(mpiexec: tuple[str, ...], tmp_path: Path) -> None:
    """Of a model with buffers, too: they have tags of their own, and MPICH has fewer than others."""
    script = write_script(tmp_path)
    text = SCRIPT.replace("torch.nn.Dropout(0.1)", "torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1)")
    text = text.replace("batch=12", "batch=24")
    script.write_text(text)
    expected = alone(script)
    text = text.replace("    exact=True,", "    exact=True, transport='mpi', strategy=strategy,")
    script.write_text(f"for strategy in {STRATEGIES}:\n" + textwrap.indent(text, "    "))
    code, said = run(mpiexec, 3, script)
    assert (code, fingerprints(said)) == (0, 3 * len(STRATEGIES) * [expected]), said


def test_a_rank_that_fails_ends_the_others(mpiexec: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "import paceline.comm.mpi.register\n"
        "dist.init_process_group('mpi')\n"
        "if dist.get_rank() == 1: raise ValueError('of rank 1')\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    code, said = run(mpiexec, 3, script)
    assert code != 0 and "of rank 1" in said, said


def test_a_rank_that_enters_no_operation_is_named(mpiexec: tuple[str, ...], tmp_path: Path) -> None:
    """Within the timeout; one that waits as long for a message is not in the collective either."""
    script = tmp_path / "late.py"
    script.write_text(
        "import os, time\n"
        "from datetime import timedelta\n"
        "from pathlib import Path\n"
        "import torch, torch.distributed as dist\n"
        "import paceline.comm.mpi.register\n"
        "dist.init_process_group('mpi')\n"
        "rank, end = dist.get_rank(), time.monotonic() + 60\n"
        "dist.barrier()\n"
        "if rank == 0: dist.irecv(torch.ones(1), 1, tag=7)\n"
        "if rank != 1:\n"
        "    work = dist.all_reduce(torch.ones(1000), async_op=True)\n"
        "    if rank == 2: dist.irecv(torch.ones(1), 1, tag=7)\n"
        "    Path(f'entered-{rank}').touch()\n"
        "    while len(list(Path().glob('entered-*'))) < 2 and time.monotonic() < end: time.sleep(0.01)\n"
        "    try: work.wait(timedelta(seconds=12))\n"
        "    except RuntimeError as error: Path(f'said-{rank}').write_text(str(error))\n"
        "while len(list(Path().glob('said-*'))) < 2 and time.monotonic() < end: time.sleep(0.05)\n"
        "os._exit(0)\n"
    )
    _, said = run(mpiexec, 3, script)
    texts = {path.name: path.read_text() for path in tmp_path.glob("said-*")}
    late = "Timed out waiting 12 s for an all-reduce over MPI: rank 1 did not enter it"
    assert texts == {"said-0": late, "said-2": late}, said


def test_other_launchers_are_refused(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "-n", "2", "--set", "transport=mpi", script],
        cwd=tmp_path,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2 and "needs workers that mpiexec has started" in ended.stdout + ended.stderr
