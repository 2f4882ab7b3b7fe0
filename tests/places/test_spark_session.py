"""A SparkSession and its DataFrames: each rank's result, the bits of one process, the first cause."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from spark_cluster import SparkCluster
from training import fingerprints

DOCS = Path(__file__).resolve().parents[2] / "docs"
pytestmark = pytest.mark.timeout(900)

FUNCTION = """
import os, signal, sys
from functools import partial
from pathlib import Path
import torch
import paceline


def train(data, kill=None):
    torch.manual_seed(0)
    session = paceline.start(
        model=torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        loss=torch.nn.functional.cross_entropy,
        data=data,
        batch=12,
        exact=True,
        timeout_seconds=120,
    )
    for batch in session.batches(epochs=2):
        session.step(batch)
        if kill and session.rank == 1 and session.position == 7 and not Path(kill).exists():
            Path(kill).touch()
            task = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(task, signal.SIGKILL)
            while True:  # Spark ends it
                signal.pause()
    return session.rank, session.workers, session.fingerprint()


def fail():
    if os.environ["RANK"] == "1":
        raise LookupError("rank 1 has no such thing")
    signal.pause()  # ends with the other one
"""

DRIVER = """
import json
import cloudpickle, job
import re
from pyspark.sql import SparkSession

os.environ["PYSPARK_PYTHON"] = sys.executable
FOUND = {}
cloudpickle.register_pickle_by_value(job)  # the executors do not have this folder

def raised(call):
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

spark = SparkSession.builder.master("spark://127.0.0.1:7077").getOrCreate()
torch.manual_seed(0)
inputs = torch.randn(96, 8)
rows = [(row.tolist(), int(row[:4].argmax())) for row in inputs]
frame = spark.createDataFrame(rows, "inputs array<float>, label bigint")
"""


def driven(spark: SparkCluster, folder: Path, body: str) -> dict[str, Any]:
    """Run a driver that adds to FOUND."""
    (folder / "job.py").write_text(FUNCTION)
    script = folder / "driver.py"
    script.write_text(f"from job import *\n{DRIVER}\n{body}\nprint('FOUND ' + json.dumps(FOUND), flush=True)\n")
    code, said = spark.finish(spark.python(script, cwd=folder))
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if line.startswith("FOUND ")]
    # Spark's own log may follow before the end of the line
    found: dict[str, Any] = json.JSONDecoder().raw_decode(line.removeprefix("FOUND "))[0]
    return found


TRAINED = """
FOUND["results"] = paceline.launch(train, frame.repartition(3), "killed", on=spark, nodes=2)
data = paceline.ParquetDataset.from_spark(frame.repartition(7), "samples")
FOUND["same"] = sorted((row[0].tolist(), int(row[1])) for row in data) == sorted((list(x), y) for x, y in rows)
"""

ALONE = """
from job import *
print("fingerprint", train(paceline.ParquetDataset("samples", ["inputs", "label"]))[2])
"""


def test_the_bits_of_one_process_through_the_loss_of_a_task(spark: SparkCluster, tmp_path: Path) -> None:
    found = driven(spark, tmp_path, TRAINED)
    (tmp_path / "alone.py").write_text(ALONE)
    alone = subprocess.run([sys.executable, "alone.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert alone.returncode == 0, alone.stderr
    (expected,) = fingerprints(alone.stdout)
    assert found == {"results": [[rank, 2, expected] for rank in range(2)], "same": True}
    assert (tmp_path / "killed").exists()
    assert not list((tmp_path / "runs").glob(".call-*"))


CAUSE = """
FOUND["cause"] = raised(lambda: paceline.launch(fail, on=spark, workers=2))
FOUND["usable"] = spark.range(5).count()
"""


def test_the_first_cause_is_raised_and_the_session_goes_on(spark: SparkCluster, tmp_path: Path) -> None:
    assert driven(spark, tmp_path, CAUSE) == {"cause": "LookupError: rank 1 has no such thing", "usable": 5}


REFUSED = """
from pyspark.ml.linalg import Vectors
FOUND["slots"] = raised(lambda: paceline.launch(train, frame, on=spark, nodes=5, patience=10))
FOUND["cpus"] = raised(lambda: paceline.launch(train, frame, on=spark, workers=3))
FOUND["no session"] = raised(lambda: paceline.launch(train, frame, on=3))
FOUND["date"] = raised(lambda: paceline.launch(train, spark.sql("select 1 as x, current_date() as day"), on=spark))
FOUND["null"] = raised(lambda: paceline.launch(train, spark.sql("select cast(null as bigint) as y"), on=spark))
FOUND["no rows"] = raised(lambda: paceline.launch(train, frame.limit(0), on=spark))
pairs = [(Vectors.dense([1.0, 2.0]), "a"), (Vectors.sparse(2, {1: 3.0}), "b")]
vectors = spark.createDataFrame(pairs, ["x", "y`z"])
data = paceline.ParquetDataset.from_spark(vectors, Path("vectors"))
FOUND["vectors"] = sorted((x.tolist(), y) for x, y in data)
FOUND["there"] = raised(lambda: paceline.ParquetDataset.from_spark(vectors, "vectors"))
"""


def test_what_is_refused(spark: SparkCluster, tmp_path: Path) -> None:
    found = driven(spark, tmp_path, REFUSED)
    assert "needs 5 slots of 1 CPUs" in found["slots"] and "Spark has 4" in found["slots"]
    assert "StartError: -n 3: Spark does not give a task 3 CPUs: " in found["cpus"]
    assert found["no session"] == "ConfigError: on = a int: give the name of a place, or a SparkSession."
    assert "'day' of the DataFrame is of type date" in found["date"]
    assert "Column 'y' has nulls in row group 0" in found["null"]
    assert "There are no rows in" in found["no rows"]
    assert found["vectors"] == [[[0.0, 3.0], "b"], [[1.0, 2.0], "a"]]
    assert "vectors is there already" in found["there"]


def said_by_page(spark: SparkCluster, folder: Path, page: str) -> str:
    """Run the first Python of a page from a heading on; gives what it said."""
    source = page.partition("```python\n")[2].partition("```")[0]
    for shown, there in (("spark://host:7077", spark.master), ("/local/samples", f"{spark.disk}/samples")):
        source = source.replace(shown, there)
    script = folder / "notebook.py"
    script.write_text(f"import os, sys\nos.environ['PYSPARK_PYTHON'] = sys.executable\n{source}")
    code, said = spark.finish(spark.python(script, cwd=folder))
    assert code == 0, said
    return said


def test_the_page(spark: SparkCluster, tmp_path: Path) -> None:
    page = (DOCS / "places" / "spark.md").read_text()
    said = said_by_page(spark, tmp_path, page.partition("## From a notebook")[2])
    losses = re.findall(r"\((\d), ([\d.e-]+)\)", said)
    assert [rank for rank, _ in losses] == ["0", "1"] and losses[0][1] == losses[1][1], said


def test_rows_that_stay_where_they_are(spark: SparkCluster, tmp_path: Path) -> None:
    page = (DOCS / "located-tables.md").read_text()
    empty_first = page.replace("numPartitions=8)", 'numPartitions=9).where("id >= 112")')
    said = said_by_page(spark, tmp_path, empty_first)
    results = re.findall(r"\((\d), (\d), ([\d.e-]+)\)", said)
    ranks, counts, losses = zip(*results, strict=True)
    assert ranks == ("0", "1", "2", "3") and len({*losses}) == 1, said
    assert counts[0] == counts[1] and counts[2] == counts[3] and int(counts[0]) + int(counts[2]) == 8, said


FIND_HOROVOD = """
from paceline.horovod.unchanged import FOLDER
sys.path.append(FOLDER)
"""
HOROVOD = """
import horovod.spark

def total(start, step=1):
    import horovod.torch as hvd
    hvd.init()
    if start < 0 and hvd.rank() == 1:
        raise LookupError(f"rank 1 has no {os.environ['MINE']}")
    return hvd.rank(), hvd.allreduce(torch.tensor(start + step * hvd.rank()), op=hvd.Sum).item()

FOUND["results"] = horovod.spark.run(total, (1,), {"step": 5}, num_proc=2)
FOUND["cause"] = raised(lambda: horovod.spark.run(total, (-1,), num_proc=2, env={**os.environ, "MINE": "such thing"}))
FOUND["mpi"] = raised(lambda: horovod.spark.run(total, (1,), use_mpi=True))
spark.stop()
FOUND["nothing"] = raised(lambda: horovod.spark.run(total, (1,)))
"""


def test_a_function_for_horovod(spark: SparkCluster, tmp_path: Path) -> None:
    found = driven(spark, tmp_path, FIND_HOROVOD + HOROVOD)
    assert found["results"] == [[0, 7], [1, 7]]
    assert found["cause"] == "LookupError: rank 1 has no such thing"
    assert len(list(tmp_path.glob("runs/*/output/*.log"))) == 4  # none was replaced
    assert "use_mpi=True has no counterpart here" in found["mpi"]
    assert "there is no SparkContext here" in found["nothing"]


ELASTIC = """
import horovod.spark, time

def train(folder):
    import horovod.torch as hvd
    hvd.init()

    @hvd.elastic.run
    def steps(state):
        while state.sizes.count(2) < 12:
            sum_of_steps = hvd.allreduce(torch.tensor(len(state.sizes)), op=hvd.Sum).item()
            agent = os.getppid()
            task = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
            for count, lost in ((4, os.getpid()), (8, task)):
                if hvd.rank() == 1 and state.sizes.count(2) == count and not (folder / f"lost-{count}").exists():
                    (folder / f"lost-{count}").touch()
                    os.kill(lost, signal.SIGKILL)
                    while lost == task:  # the agent ends with it, and this worker, too
                        signal.pause()
            state.sizes.append(hvd.size())
            state.sums.append(sum_of_steps)
            state.commit()
            time.sleep(0.05)

    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, sizes=[], sums=[])
    steps(state)
    return hvd.rank(), state.sizes, state.sums

FOUND["results"] = horovod.spark.run_elastic(train, (Path.cwd(),), num_proc=2, min_num_proc=1)
"""


def test_an_elastic_function_for_horovod(spark: SparkCluster, tmp_path: Path) -> None:
    found = driven(spark, tmp_path, FIND_HOROVOD + ELASTIC)
    assert [rank for rank, *_ in found["results"]] == [0, 1], found
    assert len({str(result[1:]) for result in found["results"]}) == 1, found
    _, sizes, sums = found["results"][0]
    assert sums == [step * size for step, size in enumerate(sizes)]  # no step was lost or repeated
    assert (tmp_path / "lost-4").exists() and (tmp_path / "lost-8").exists()
