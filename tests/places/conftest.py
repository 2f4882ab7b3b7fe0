import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import ForkServer
from ray_cluster import RayCluster
from ray_cluster import missing as ray_is_missing
from slurm_cluster import SlurmCluster, missing
from spark_cluster import SparkCluster
from spark_cluster import missing as spark_is_missing


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder needs an engine, and some patience with its start on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.place)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(autouse=True, scope="session")
def forks_one_process(fork_server: ForkServer) -> None:
    """The run of one process, with which tests compare, is forked (``training.alone``)."""


@pytest.fixture
def slurm(no_temporary_files: None) -> Iterator[SlurmCluster]:
    """A Slurm of two nodes, for one test."""
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        cluster = SlurmCluster(Path(folder))
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkCluster]:
    """A Spark of two executors, for the tests of a file."""
    if reason := spark_is_missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="spark-", ignore_cleanup_errors=True) as folder:
        cluster = SparkCluster(Path(folder))
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Where a cluster keeps its files: a short path, as those of sockets must be."""
    if reason := ray_is_missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture
def cluster(ray_folder: Path) -> Iterator[RayCluster]:
    """One of the head alone."""
    made = RayCluster(ray_folder)
    try:
        yield made
        assert made.left() == []
    finally:
        made.down()


@pytest.fixture
def ray(cluster: RayCluster) -> RayCluster:
    """One of two nodes."""
    cluster.add()
    return cluster
