"""Spark: the bits of one process through the loss of a worker and of a task."""

import signal
from pathlib import Path

import pytest
from hosts import until
from spark_cluster import SparkCluster
from training import SCRIPT, alone, fingerprints, waiting_script, write_script

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
pytestmark = pytest.mark.timeout(900)
LEAVES = """ and not world.leaving:
"""
STAYS = """:
            if world.notice():
                Path("leaving").touch()
"""


def test_a_worker_and_a_task_are_replaced(spark: SparkCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    losing = tmp_path / "losing.py"
    losing.write_text(SCRIPT.replace(STEP, LOSSES))
    code, said = spark.run("--nodes", "2", losing, cwd=tmp_path)
    assert code == 0, said
    assert (tmp_path / "lost-5").exists() and (tmp_path / "lost-11").exists()
    assert fingerprints(said) == [alone(script)], said
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_too_few_slots(spark: SparkCluster, tmp_path: Path) -> None:
    code, said = spark.run("--nodes", "5", "--patience", "20", write_script(tmp_path), cwd=tmp_path)
    assert code == 3, said
    assert "needs 5 slots of 1 CPUs" in said and "after 20 s Spark has 4" in said, said
    assert not (tmp_path / "runs").exists()


def test_the_doctor(spark: SparkCluster, tmp_path: Path) -> None:
    code, said = spark.run("--nodes", "2", "no.py", cwd=tmp_path, command="doctor")
    assert code == 1, said
    assert "FAILURE script: the script is missing on" in said and "checks on 3 machines" in said, said


def all_wait(folder: Path) -> bool:
    """Whether both workers have come to where they wait."""
    return all((folder / f"reached-{rank}").exists() for rank in range(2))


def test_a_signal_saves_and_the_next_run_resumes(spark: SparkCluster, tmp_path: Path) -> None:
    script, expected = waiting_script(tmp_path, 2)
    script.write_text(script.read_text().replace("not world.leaving", "not world.notice()"))
    words = ["--nodes", "2", "--name", "one", "--resume", "auto", script]
    run = spark.start(*words, cwd=tmp_path)
    until(lambda: all_wait(tmp_path) or run.poll() is not None, 200)
    spark.signal(signal.SIGTERM, tmp_path)
    code, said = spark.finish(run)
    assert code == 75, said
    assert "resume with: paceline run --on spark --master" in said, said
    assert spark.running(script) == []
    (tmp_path / "on").touch()
    code, said = spark.run(*words, cwd=tmp_path)
    assert code == 0, said
    assert set(fingerprints(said)) == {expected} and "from step 0" not in said, said


def test_a_second_signal_ends_the_workers(spark: SparkCluster, tmp_path: Path) -> None:
    script, _ = waiting_script(tmp_path, 2)
    script.write_text(script.read_text().replace(LEAVES, STAYS, 1))
    run = spark.start("--nodes", "2", "--grace", "200", script, cwd=tmp_path)
    until(lambda: all_wait(tmp_path) or run.poll() is not None, 200)
    spark.signal(signal.SIGINT, tmp_path)
    until(lambda: (tmp_path / "leaving").exists() or run.poll() is not None, 60)
    spark.signal(signal.SIGINT, tmp_path)
    code, said = spark.finish(run)
    assert code == 137, said
    until(lambda: spark.running(script) == [], 60)


def test_a_killed_command_leaves_nothing(spark: SparkCluster, tmp_path: Path) -> None:
    script, _ = waiting_script(tmp_path, 2)
    words = ["--nodes", "2", "--name", "one", "--resume", "auto", script]
    for number, expected in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)):
        run = spark.start(*words, cwd=tmp_path)
        until(lambda: all_wait(tmp_path) or run.poll() is not None, 200)  # noqa: B023
        spark.signal(number, tmp_path)
        code, said = spark.finish(run)
        assert code in (expected, 128 - expected), said
        until(lambda: spark.running(script) == [], 60)
        for rank in range(2):
            (tmp_path / f"reached-{rank}").unlink()
    assert "resume with: paceline run --on spark --master" in said, said
