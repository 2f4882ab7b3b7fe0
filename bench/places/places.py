"""The places, each with its contenders: Paceline's ways, and the engine's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from hosts import Hosts
from hosts import missing as no_hosts
from measure import RUN, Contender, Starter, start_here
from ray_cluster import RayCluster
from ray_cluster import missing as no_ray
from slurm_cluster import SlurmCluster
from slurm_cluster import missing as no_slurm
from spark_cluster import SparkCluster
from spark_cluster import missing as no_spark

from paceline.launchers.machine import choose_port

PYTHON = sys.executable
PACELINE = (PYTHON, "-m", "paceline", "run", "--quiet")
TORCHRUN = (PYTHON, "-m", "torch.distributed.run")
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torchrun often hangs in the second attempt: the agent's store has the addresses of the first."""


class NotHere(Exception):
    """The engine of a place is not on this machine; with what to install."""


Opened = tuple[Starter, list[Contender]]


@contextmanager
def local(_: Path) -> Iterator[Opened]:
    """Three workers of this machine, beside torchrun."""
    yield start_here, [
        Contender("torchrun --standalone --nproc-per-node 3 --max-restarts 3", (
            *TORCHRUN, "--standalone", "--nproc-per-node", "3", "--max-restarts", "3", "ddp.py",
        ), own=True, environment=OWN_STORE),
        Contender("paceline run -n 3 --elastic 2:3", (*PACELINE, "-n", "3", "--elastic", "2:3", "train.py")),
        Contender("paceline run -n 3 --standby 1", (*PACELINE, "-n", "3", "--standby", "1", "train.py")),
        Contender("paceline run -n 3, started again", (
            *PACELINE, "-n", "3", "--name", "again", "--resume", "auto", "train.py",
        ), again=True),
    ]  # fmt: skip


@contextmanager
def ssh(folder: Path) -> Iterator[Opened]:
    """Two hosts (network namespaces) with two workers each, beside torchrun on both."""
    if reason := no_hosts():
        raise NotHere(reason)
    hosts = Hosts(folder, 2)
    rendezvous = f"{' '.join(TORCHRUN)} --nnodes 2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d"
    on_host = f"cd $PWD; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS=1 {rendezvous}"
    both = "".join(
        f'ssh {name} "{on_host} --rdzv-endpoint h1:29500 --local-addr {hosts.address(name)} ddp.py" & {name}=$!; '
        for name in hosts.names
    )
    try:
        hosts.up()
        yield lambda *words, **where: hosts.start("sw", *words, **where), [
            Contender("torchrun on both hosts, by ssh", ("sh", "-c", f"{both} wait $h1 && wait $h2"), own=True),
            Contender("paceline run -H h1:2,h2:2 --elastic 3:4", (
                *PACELINE, "-H", "h1:2,h2:2", "--elastic", "3:4", "train.py",
            )),
        ]  # fmt: skip
    finally:
        hosts.down()


def _mpi(engine: str, *options: str) -> Callable[[Path], contextlib.AbstractContextManager[Opened]]:
    @contextmanager
    def place(folder: Path) -> Iterator[Opened]:
        if (found := shutil.which(engine)) is None:
            raise NotHere(f"needs {engine}: apt-get install openmpi-bin mpich")
        programs = folder / "bin"
        programs.mkdir()
        (programs / "mpiexec").write_text(f'#!/bin/sh\nexec {found} "$@"\n')
        (programs / "mpiexec").chmod(0o755)
        mpiexec = (found, *options, "-n", "3", PYTHON)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(choose_port(None))}
        path = {"PATH": f"{programs}:{os.environ['PATH']}"}
        yield start_here, [
            Contender("mpiexec -n 3 python ddp.py, started again", (*mpiexec, "ddp.py"), True, True, address),
            Contender("mpiexec -n 3 python train.py, started again", (*mpiexec, "train.py"), again=True),
            Contender("paceline run --on mpi -n 3 --elastic 2:3", (
                *PACELINE, "--on", "mpi", "-n", "3", "--elastic", "2:3", "train.py",
            ), environment=path),
        ]  # fmt: skip

    return place


@contextmanager
def slurm(folder: Path) -> Iterator[Opened]:
    """Two nodes with two workers each, beside srun of the script, and srun of torchrun."""
    if reason := no_slurm():
        raise NotHere(reason)
    cluster = SlurmCluster(folder)
    port = str(choose_port(None))
    srun = ("srun", "-N", "2", "-n", "4", "--ntasks-per-node", "2", "-K", PYTHON)
    agents = ("srun", "-N", "2", "-n", "2", "-K", *TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2")
    rendezvous = ("--max-restarts", "3", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1")
    try:
        cluster.up()
        yield cluster.start, [
            Contender("srun torchrun --max-restarts 3", (
                *agents, *rendezvous, "--rdzv-endpoint", f"127.0.0.1:{port}", "ddp.py",
            ), own=True, environment=OWN_STORE),
            Contender("srun python ddp.py, started again", (
                *srun, "ddp.py",
            ), again=True, environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}),
            Contender("srun python train.py, started again", (*srun, "train.py"), again=True),
            Contender("salloc paceline run -n 2 --elastic 3:4", (
                "salloc", "-Q", "-N", "2", *PACELINE, "-n", "2", "--elastic", "3:4", "train.py",
            )),
            Contender("paceline run --on slurm --nodes 2 -n 2 --elastic 3:4", (
                *PACELINE, "--on", "slurm", "--nodes", "2", "-n", "2", "--elastic", "3:4", "train.py",
            )),
        ]  # fmt: skip
    finally:
        cluster.down()


def _inside(first: int, folder: Path) -> tuple[str | Path, ...]:
    """Words before a command that put it into namespaces, of which a process of ``unshare --fork`` is the parent."""
    children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    enter = ("nsenter", "--net", "--pid", "--mount", f"--target={children[0]}", "--")
    return (*enter, "sh", "-c", 'cd "$0"; exec "$@"', folder / RUN)


@contextmanager
def ray(folder: Path) -> Iterator[Opened]:
    """Two nodes with two workers each, beside Ray Train."""
    reason = no_ray()
    if reason is None and (find_spec("pandas") is None or find_spec("ray.train") is None):
        reason = "needs Ray Train: pip install 'ray[train]'"
    if reason:
        raise NotHere(reason)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:  # as paths of sockets must be
        cluster = RayCluster(Path(short))
        try:
            cluster.add()
            known = {"RAY_ADDRESS": str(cluster.address)}
            yield lambda *words, cwd, environment: cluster.start(*words, cwd=cwd, **environment).process, [
                Contender("TorchTrainer of Ray Train, max_failures=3", (
                    PYTHON, "ray_train.py",
                ), own=True, environment=known),
                Contender("paceline run --on ray -n 2 --nodes 2 --elastic 3:4", (
                    *PACELINE, "--on", "ray", "-n", "2", "--nodes", "2", "--elastic", "3:4", "train.py",
                ), environment=known),
            ]  # fmt: skip
        finally:
            cluster.down()


@contextmanager
def spark(folder: Path) -> Iterator[Opened]:
    """A standalone cluster of two executors in namespaces of its own, with a worker each, beside TorchDistributor."""
    if reason := no_spark():
        raise NotHere(reason)
    cluster = SparkCluster(folder)
    try:
        cluster.up()
        inside = _inside(cluster.first, folder)
        here = {**cluster.environment, "PYSPARK_PYTHON": PYTHON, "PYSPARK_DRIVER_PYTHON": PYTHON}
        on_spark = (*PACELINE, "--on", "spark", "--master", cluster.master, "--nodes", "2")
        yield start_here, [
            Contender("TorchDistributor, started again", (
                *inside, PYTHON, "torch_distributor.py", cluster.master,
            ), own=True, again=True, environment=here),
            Contender("paceline run --on spark --nodes 2 --elastic 1:2", (
                *inside, *on_spark, "--elastic", "1:2", "train.py",
            ), environment=here),
        ]  # fmt: skip
    finally:
        cluster.down()


PLACES: dict[str, Callable[[Path], contextlib.AbstractContextManager[Opened]]] = {
    "local": local,
    "ssh": ssh,
    "openmpi": _mpi("mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    "mpich": _mpi("mpiexec.hydra"),
    "slurm": slurm,
    "ray": ray,
    "spark": spark,
}
