"""Spark: the bits of one process through the loss of a worker and of a task."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from spark_cluster import SparkCluster, missing
from training import SCRIPT, alone, fingerprints, write_script

STEP = "    session.step(batch)\n"
LOSSES = """    session.step(batch)
    agent = os.getppid()
    task = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    for position, lost in ((5, os.getpid()), (11, task)):
        if session.rank == 1 and session.position == position and not Path(f"lost-{position}").exists():
            Path(f"lost-{position}").touch()
            os.kill(lost, signal.SIGKILL)
            while lost == task:  # Spark ends it
                signal.pause()
"""


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkCluster]:
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="spark-", ignore_cleanup_errors=True) as folder:
        cluster = SparkCluster(Path(folder))
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()


def test_the_bits_of_one_process(spark: SparkCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    code, said = spark.run("--nodes", "2", script, cwd=tmp_path)
    assert code == 0, said
    assert set(fingerprints(said)) == {alone(script)}, said
    assert "rank 0 of 2" in said


def test_a_worker_is_replaced_and_a_task_resumed(spark: SparkCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    losing = tmp_path / "losing.py"
    losing.write_text(SCRIPT.replace(STEP, LOSSES))
    code, said = spark.run("--nodes", "2", "--set", "checkpoint.every=2", losing, cwd=tmp_path)
    assert code == 0, said
    assert (tmp_path / "lost-5").exists() and (tmp_path / "lost-11").exists()
    assert said.count("Spark has lost a task") == 1, said
    assert set(fingerprints(said)) == {alone(script)}, said
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_too_few_slots(spark: SparkCluster, tmp_path: Path) -> None:
    code, said = spark.run("--nodes", "3", write_script(tmp_path), cwd=tmp_path)
    assert code == 3, said
    assert "needs 3 slots of 1 CPUs" in said and "Spark has 2" in said, said
    assert not (tmp_path / "runs").exists()


def test_the_doctor(spark: SparkCluster, tmp_path: Path) -> None:
    code, said = spark.run("--nodes", "2", "no.py", cwd=tmp_path, command="doctor")
    assert code == 1, said
    assert "FAILURE script: the script is missing on" in said and "checks on 2 machines" in said, said
