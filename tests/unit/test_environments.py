"""What variables of an engine mean."""

import pytest

from paceline.comm.rendezvous.devices import Gpus, choose_free, choose_gpu
from paceline.comm.rendezvous.networks import shared_address
from paceline.comm.rendezvous.port_exchange import PortServer, ask_port
from paceline.environments.find import find_start, first_host, tasks_per_node
from paceline.environments.start import Identity, threads_of
from paceline.errors import ConfigError

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,1(x2)",
    "SLURM_STEP_NODELIST": "gpu[08-10]-ib",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-here-7@1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PMI_FD": "8"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
ADDRESS = {"MASTER_ADDR": "first", "MASTER_PORT": "1234"}


def test_nothing() -> None:
    assert find_start({}).identity == Identity()


def test_a_step_of_slurm() -> None:
    start = find_start(STEP)
    assert start.identity == Identity(4, 5, 0, 1)
    assert (start.engine, start.host) == ("Slurm", "gpu08-ib")
    other = {**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert find_start(other).port == start.port
    assert find_start({**STEP, "SLURM_STEP_ID": "4"}).port != start.port
    assert find_start({**STEP, **ADDRESS}).host == "first"
    assert find_start({**STEP, "MASTER_PORT": "1234"}).port == 1234


def test_a_step_on_one_node_stays_inside() -> None:
    assert find_start({**STEP, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}).host == "127.0.0.1"


def test_a_batch_script_is_one_worker() -> None:
    batch = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    assert find_start(batch).identity == Identity()


def test_open_mpi_lets_processes_go_on_with_ulfm() -> None:
    assert not find_start(OPEN_MPI).survives
    assert find_start({**OPEN_MPI, "OMPI_MCA_mpi_ft_enable": "1"}).survives


def test_open_mpi() -> None:
    start = find_start({**STEP, **OPEN_MPI})  # its daemons are started by srun
    assert (start.engine, start.identity) == ("Open MPI", Identity(1, 2, 1, 2))
    assert (start.host, start.port) == ("127.0.0.1", None)
    assert start.job == "prterun-here-7@1"
    assert find_start({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}).host is None


def test_mpich_and_intel() -> None:
    start = find_start({**STEP, **MPICH})
    assert (start.engine, start.identity) == ("MPICH", Identity(2, 4, 0, 2))
    assert (start.host, start.manager) == (None, 8)
    assert find_start({**MPICH, "I_MPI_ROOT": "/opt"}).engine == "Intel MPI"
    direct = {name: value for name, value in MPICH.items() if name.startswith("PMI")}  # srun --mpi=pmi2
    assert find_start({**STEP, **direct}).engine == "Slurm"


@pytest.mark.parametrize("outer", [STEP, OPEN_MPI, MPICH])
def test_the_innermost_launcher_wins(outer: dict[str, str]) -> None:
    start = find_start({**outer, **TORCHRUN, **ADDRESS})
    assert (start.engine, start.identity) == ("torchrun", Identity(1, 3, 1, 3))
    assert (start.host, start.port) == ("first", 1234)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**STEP, "SLURM_PROCID": "5"}, "SLURM_PROCID"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE='many'"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "3;1"}, "3;1"),
        ({**TORCHRUN, "MASTER_PORT": "none"}, "MASTER_PORT"),
    ],
)
def test_variables_without_sense(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_start(variables)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("alpha,beta", "alpha"), ("n[1-2],m", "n1"), ("r[3,5-6]n[007-100]-ib,x", "r3n007-ib"), ("", "")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_tasks_per_node() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_the_network_that_all_machines_share() -> None:
    bridge = "172.17.0.1/16"
    first, second = [bridge, "192.168.1.4/24", "10.1.0.1/16"], [bridge, "10.1.9.2/16"]
    assert shared_address([first, first, second]) == "10.1.0.1"
    assert shared_address([["10.1.0.1/16"], ["10.2.0.1/16"]]) == "10.1.0.1"  # by a router
    assert shared_address([[bridge], second]) is None
    assert shared_address([[], second]) is None


def test_the_port_of_rank_0() -> None:
    assert ask_port("one job", 0) is None
    server = PortServer("one job", 4321)
    try:
        assert ask_port("one job", 60) == 4321
        assert ask_port("another job", 0) is None
        with pytest.raises(OSError, match="in use"):
            PortServer("one job", 1234)
    finally:
        server.close()
    assert ask_port("one job", 0) is None


def test_hydra_without_variables() -> None:
    silent = {"PMI_ID": "1", "PMI_PORT": "here:4000", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(ConfigError, match="-pmi-port"):
        find_start(silent)
    assert find_start({**silent, **TORCHRUN}).engine == "torchrun"
    assert find_start({**silent, **MPICH}).identity.rank == 2


@pytest.mark.parametrize(
    ("own", "machine", "workers", "threads"),
    [(8, 8, 4, 2), (2, 8, 4, 2), (1, 8, 4, 1), (8, 8, 3, 2), (2, 2, 4, 1), (4, 1, 2, 2), (2, 64, 4, 2)],
    ids=str,
)
def test_threads_of_a_worker(own: int, machine: int, workers: int, threads: int) -> None:
    assert threads_of(own, machine, workers) == threads


def test_the_cores_of_a_step() -> None:
    assert find_start({**STEP, "SLURM_CPUS_ON_NODE": "8"}).cores == 8
    assert find_start(OPEN_MPI).cores is None


@pytest.mark.parametrize(
    ("visible", "local_rank", "number"), [(0, 0, None), (1, 0, 0), (1, 3, 0), (2, 3, 1), (4, 3, 3), (8, 3, 3)], ids=str
)
def test_the_gpu_of_a_worker(visible: int, local_rank: int, number: int | None) -> None:
    assert choose_gpu(visible, local_rank) == number


@pytest.mark.parametrize(
    ("own", "visible", "chosen"),
    [
        (["a", "b", ""], ["abc"] * 3, "abc"),
        (["", "b", "c"], ["abc"] * 3, "abc"),  # ranks have moved up
        (["", ""], ["ab"] * 2, "ab"),
        (["a", "", "", ""], ["ab"] * 4, "abab"),
        (["a", "", "d"], ["ab", "cd", "cd"], "acd"),
        (["a", ""], ["a", "b"], "ab"),  # each sees its own
        (["a", ""], ["a", "a"], "aa"),
    ],
    ids=str,
)
def test_who_joins_gets_a_free_gpu(own: list[str], visible: list[str], chosen: str) -> None:
    workers = [Gpus(gpu, [*those]) for gpu, those in zip(own, visible, strict=True)]
    assert choose_free(workers) == [*chosen]
