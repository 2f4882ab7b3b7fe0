import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
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
