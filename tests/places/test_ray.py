"""Training on a Ray cluster of two nodes, through all that can happen to it."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_cluster import RayCluster
from training import SCRIPT, alone, fingerprints, waiting_script, write_script

STEP = "    session.step(batch)\n"
SAVED = "--set", "checkpoint.every=2", "--set", "checkpoint.background=false"
ALONE_FIRST = """    session.step(batch)
    if session.position == 3 and session.workers < 4:
        Path(f"two-{session.rank}").write_text("here")
"""
DEAF = """    session.step(batch)
    if session.position == 5:
        Path(f"reached-{session.rank}").write_text("here")
        while True:
            if session._context.world.notice():
                Path(f"leaves-{session.rank}").write_text("here")
            time.sleep(0.05)
"""
LAUNCHES = """
import os, sys
from functools import partial
import torch
import paceline

def train(seed):
    torch.manual_seed(seed)
    inputs = torch.randn(48, 4)
    session = paceline.start(
        model=torch.nn.Linear(4, 1), optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.mse_loss,
        data=torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch=12, exact=True,
    )
    for batch in session.batches(epochs=1):
        session.step(batch)
    return session.rank, session.fingerprint()

def fail():
    raise LookupError("no such thing")

where = dict(workers=2, nodes=2, on="ray", address=sys.argv[1])
results = paceline.launch(train, 7, **where)
assert [rank for rank, _ in results] == [0, 1, 2, 3], results
assert {found for _, found in results} == {train(7)[1]}
try:
    paceline.launch(fail, **where)
except LookupError as error:
    print("raised", error)
"""
DATA = """
import sys, time
from functools import partial
import numpy, ray, ray.data, torch
import paceline

def square(rows):
    time.sleep(0.5 if 0 in rows["id"] else 0.0)  # the first block comes last
    part = rows["id"].astype("float32") / 96
    return {"input": numpy.stack([part, numpy.ones_like(part)], 1), "target": part * part}

def train(data):
    torch.manual_seed(0)
    session = paceline.start(
        model=torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0)),
        optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.mse_loss, data=data, batch=12, exact=True,
    )
    for batch in session.batches(epochs=2):
        session.step(batch)
    return session.fingerprint()

rows = {name: torch.from_numpy(column) for name, column in square({"id": numpy.arange(96)}).items()}
expected = train(torch.utils.data.TensorDataset(rows["input"], rows["target"]))

ray.init(sys.argv[1], log_to_driver=False)
dataset = ray.data.range(96, override_num_blocks=6).map_batches(square, batch_size=16)
data = paceline.ParquetDataset.from_ray(dataset, "rows")
assert not dataset.context.execution_options.preserve_order
assert set(paceline.launch(train, data, workers=2, nodes=1, on="ray")) == {expected}
assert set(paceline.launch(train, dataset, workers=2, nodes=2, on="ray")) == {expected}
assert ray.is_initialized()
try:
    paceline.launch(train, data, on="ray", address="head:6379")
except paceline.ConfigError as error:
    print(error)
"""


@pytest.fixture
def no_cluster(ray_folder: Path) -> Iterator[RayCluster]:
    """A machine without one."""
    made = RayCluster(ray_folder, head=False)
    try:
        yield made
        assert made.left() == []
    finally:
        made.down()


def test_a_killed_worker(ray: RayCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    expected = alone(script)
    script.write_text(SCRIPT.replace('os.environ.get("KILL")', "True"))
    code, said = ray.train("-n", "2", "--nodes", "2", script, cwd=tmp_path).wait()
    assert (code, fingerprints(said)) == (0, [expected]), said
    assert (tmp_path / "killed").exists()


def test_nodes_come_and_go(cluster: RayCluster, tmp_path: Path) -> None:
    script, expected = waiting_script(tmp_path, 4)
    script.write_text(script.read_text().replace(STEP, ALONE_FIRST, 1))
    run = cluster.train("-n", "2", "--nodes", "1:2", "--elastic", "2:4", script, cwd=tmp_path)
    run.wait_for(tmp_path, "two-*", 2)
    second = cluster.add()
    workers = run.wait_for(tmp_path, "reached-*", 4)
    cluster.remove(second)
    cluster.wait_for_ends(workers, 2)
    (tmp_path / "on").touch()
    cluster.add()
    code, said = run.wait()
    assert (code, fingerprints(said)) == (0, [expected]), said


def test_ctrl_c_saves_and_the_next_run_resumes(ray: RayCluster, tmp_path: Path) -> None:
    script, expected = waiting_script(tmp_path, 4)
    words = ["-n", "2", "--nodes", "2", "--name", "one", "--resume", "auto", script]
    script.write_text(script.read_text().replace("not world.leaving", "not world.notice()"))
    run = ray.train(*words, cwd=tmp_path)
    run.wait_for(tmp_path, "reached-*", 4)
    run.press_ctrl_c()
    code, said = run.wait()
    assert code == 75, said
    assert re.search(r"resume with: paceline run --on ray .*--name one --resume auto", said), said
    assert ray.left() == []
    (tmp_path / "on").touch()
    code, said = ray.train(*words, cwd=tmp_path).wait()
    assert (code, fingerprints(said)) == (0, [expected]), said
    assert "from step 0" not in said


def test_a_second_ctrl_c_ends_it_at_once(ray: RayCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    script.write_text("import time\n" + SCRIPT.replace(STEP, DEAF))
    run = ray.train("-n", "2", "--nodes", "2", "--grace", "1000", script, cwd=tmp_path)
    run.wait_for(tmp_path, "reached-*", 4)
    run.press_ctrl_c()
    run.wait_for(tmp_path, "leaves-*", 1)
    run.press_ctrl_c()
    code, said = run.wait()
    assert code == 137, said


def test_a_killed_command_leaves_nothing(ray: RayCluster, tmp_path: Path) -> None:
    script, expected = waiting_script(tmp_path, 4)
    words = ["-n", "2", "--nodes", "2", "--name", "one", *SAVED, "--resume", "auto", script]
    run = ray.train(*words, cwd=tmp_path)
    run.wait_for(tmp_path, "reached-*", 4)
    run.kill()
    run.wait()
    assert ray.left() == []
    (tmp_path / "on").touch()
    code, said = ray.train(*words, cwd=tmp_path).wait()
    assert (code, fingerprints(said)) == (0, [expected]), said
    assert "from step 0" not in said


def test_a_cluster_that_is_too_small(ray: RayCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    code, said = ray.train("-n", "3", "--nodes", "2", "--patience", "8", script, cwd=tmp_path).wait()
    assert code == 3, said
    assert "2 nodes with 3 CPU each asked for; there: 127.0.0.1 with 2 CPU; 127.0.0.1 with 2 CPU; free: 4 CPU" in said
    assert not (tmp_path / "runs").exists()


def test_a_function(ray: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "launches.py").write_text(LAUNCHES)
    code, said = ray.start(sys.executable, "launches.py", str(ray.address), cwd=tmp_path).wait()
    assert code == 0 and "raised no such thing" in said, said


def test_a_dataset_of_ray(ray: RayCluster, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("pandas")
    (tmp_path / "data.py").write_text(DATA)
    code, said = ray.start(sys.executable, "data.py", str(ray.address), cwd=tmp_path).wait()
    assert code == 0, said
    assert f"this process is connected to the Ray cluster at {ray.address}" in said


def test_a_node_without_the_script(cluster: RayCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    cluster.add_without(tmp_path, num_cpus=3)
    code, said = cluster.train("-n", "3", script, cwd=tmp_path).wait()
    assert code == 3, said
    assert f"node 127.0.0.1 has no {script}. Put the script where all nodes see it" in said, said
    assert not (tmp_path / "runs").exists()


def test_gpus(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.add(num_cpus=1, num_gpus=2)
    script = tmp_path / "devices.py"
    script.write_text("import os; open('sees', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])")
    code, said = cluster.train("-n", "1", "--gpus", "2", script, cwd=tmp_path).wait()
    assert code == 0, said
    assert (tmp_path / "sees").read_text() == "0,1"
    code, said = cluster.train("-n", "1", "--gpus", "3", "--patience", "1", script, cwd=tmp_path).wait()
    assert code == 3 and "1 node with 1 CPU, 3 GPU asked for" in said and "127.0.0.1 with 1 CPU, 2 GPU" in said, said


def test_a_cluster_of_its_own(no_cluster: RayCluster, tmp_path: Path) -> None:
    script, expected = waiting_script(tmp_path, 2)
    script.write_text(script.read_text().replace("not world.leaving", "not world.notice()"))
    words = ["-n", "2", "--name", "one", "--resume", "auto", script]
    run = no_cluster.train(*words, cwd=tmp_path)
    run.wait_for(tmp_path, "reached-*", 2)
    run.press_ctrl_c()
    code, said = run.wait()
    assert code == 75 and "no Ray cluster was found: starting one on this machine" in said, said
    assert no_cluster.left() == []
    (tmp_path / "on").touch()
    code, said = no_cluster.train(*words, cwd=tmp_path).wait()
    assert (code, fingerprints(said)) == (0, [expected]), said


def test_a_killed_command_leaves_no_cluster_of_its_own(no_cluster: RayCluster, tmp_path: Path) -> None:
    script, _ = waiting_script(tmp_path, 2)
    run = no_cluster.train("-n", "2", script, cwd=tmp_path)
    run.wait_for(tmp_path, "reached-*", 2)
    run.kill()
    run.wait()


def test_no_cluster_is_there(no_cluster: RayCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path)
    code, said = no_cluster.train("-n", "1", "--nodes", "2", script, cwd=tmp_path).wait()
    assert code == 3 and "no Ray cluster was found, and a new one has one node, of 2 that are asked for" in said, said
    words = ["--address", "127.0.0.1:1", "--patience", "10", script]
    code, said = no_cluster.train(*words, cwd=tmp_path).wait()
    assert code == 3 and "--on ray: the cluster at 127.0.0.1:1 cannot be reached: " in said, said
    assert not (tmp_path / "runs").exists()


def test_the_doctor(ray: RayCluster, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "paceline", "doctor", "--on", "ray", "--address", str(ray.address))
    code, said = ray.start(*command, "--nodes", "2", "no.py", cwd=tmp_path).wait()
    assert code == 1, said
    assert "FAILURE script: the script is missing on" in said and "checks on 3 machines" in said, said


def test_rows_that_stay_where_they_are(cluster: RayCluster, tmp_path: Path) -> None:
    """Two nodes have another disk in the same folder."""
    disk = tmp_path / "disk"
    disk.mkdir()
    cluster.add_without(disk, num_cpus=2)
    page = (Path(__file__).resolve().parents[2] / "docs" / "located-tables.md").read_text()
    _, first, second, *_ = [block.partition("```")[0] for block in page.split("```python\n")]
    source = first.partition("\nspark = ")[0].replace("from pyspark.sql import SparkSession\n", "") + second
    source = source.replace("/local/samples", f"{disk}/samples").replace('"auto"', f'"{cluster.address}"')
    wide = 'row | {"pad": [0.5] * 10_000}'  # blocks that Ray keeps on a node
    more = f"""
ray.data.DataContext.get_current().execution_options.preserve_order = True  # or else blocks have other numbers
dataset = dataset.map(lambda row: {wide}).materialize()
FOLDER += "-2"
print(results, paceline.launch(train, write_shards(dataset, FOLDER), on="ray", nodes=2, workers=1), sep="\\n")
"""
    (tmp_path / "notebook.py").write_text(source + more)
    code, said = cluster.start(sys.executable, "notebook.py", cwd=tmp_path).wait()
    assert code == 0, said
    both = re.findall(r"\[\(0, (\d), ([\d.e-]+)\), \(1, (\d), ([\d.e-]+)\)\]", said)
    assert [int(left) + int(right) for left, _, right, _ in both] == [8, 8], said
    assert len({loss for _, one, _, other in both for loss in (one, other)}) == 1, said
    assert "0" not in both[1], said
