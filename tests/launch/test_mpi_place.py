"""The command line of mpiexec, as data."""

from pathlib import Path

import pytest

from paceline.environments import env
from paceline.errors import ConfigError, StartError
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Options
from paceline.launchers.clusters.mpi import Mpi, mpiexec_command

REQUEST = Request(Path("train.py"), workers=2)


def mpiexec(folder: Path, says: str) -> dict[str, str]:
    """An environment with an mpiexec of this version."""
    program = folder / "mpiexec"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    return {"PATH": str(folder)}


def test_open_mpi_on_two_hosts(tmp_path: Path) -> None:
    environment = mpiexec(tmp_path, "mpiexec (Open MPI) 5.0.11")
    placement = Mpi().decide(REQUEST, Options(hosts="h1:3,h2"), environment)
    first, second = placement.text.split(" : ")
    assert "--host h1" in first and "-n 3" in first and f"-x {env.SECRET}" in first
    assert "--host h2" in second and "-n 2" in second and f"-x {env.SECRET}" in second
    assert placement.text.count("--bind-to none") == 1
    assert first.count("--nodes 2 --rendezvous h1:") == second.count("--nodes 2 --rendezvous h1:") == 1
    secret = placement.agents[0].environment[env.SECRET]
    assert secret and secret == placement.agents[1].environment[env.SECRET]
    assert secret not in placement.text + repr(placement)


def test_mpich_here(tmp_path: Path) -> None:
    text = Mpi().decide(REQUEST, Options(), mpiexec(tmp_path, "HYDRA build details:")).text
    assert "-host" not in text and "-x" not in text and "--rendezvous 127.0.0.1:" in text


def test_hosts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb:2\n")
    environment = mpiexec(tmp_path, "Intel(R) MPI Library for Linux* OS, Version 2021.18")
    text = Mpi().decide(REQUEST, Options(hostfile=tmp_path / "hosts"), environment).text
    assert text.startswith(f"{tmp_path / 'mpiexec'} -hosts a,b -ppn 1 -n 1 ") and text.count(" : -n 1 ") == 1


def test_only_root_is_told_to_open_mpi() -> None:
    assert "--allow-run-as-root" in mpiexec_command("mpiexec", "mpirun (Open MPI) 4.1.4", True, ())
    assert "--allow-run-as-root" not in mpiexec_command("mpiexec", "mpirun (Open MPI) 4.1.4", False, ())


def test_what_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="apt-get install openmpi-bin"):
        Mpi().decide(REQUEST, Options(), {"PATH": str(tmp_path)})
    with pytest.raises(StartError, match=r"not from a known MPI: --version says 'mine 1\.0'"):
        Mpi().decide(REQUEST, Options(), mpiexec(tmp_path, "mine 1.0"))
    with pytest.raises(ConfigError, match="give one of them"):
        Mpi().decide(REQUEST, Options(hosts="h1", hostfile=tmp_path / "hosts"), {})
    with pytest.raises(ConfigError, match="name the hosts"):
        Mpi().decide(Request(Path("train.py"), nodes=(2, 2)), Options(), {})
