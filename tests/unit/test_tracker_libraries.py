"""The trackers' own libraries, offline: what is in their files after a run and its resume."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import textwrap
import zipfile
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fork_server import Command, ForkServer

SCRIPT = """
import os, sys
from pathlib import Path
from paceline.adapters.trackers.base import TrackedRun
from paceline.adapters.trackers import feed as feeds
from paceline.adapters.trackers.feed import Feed

feeds._CLOSING_SECONDS = 200.0
name, position, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
folder = Path.cwd() / "trackers"
about = {"batch": 8}, {}, {"python": "3"}
run = TrackedRun("0123456789abcdef", "tests", "one", folder, folder / "one", position, *about)
Path("said.txt").write_text("two words")
feed = Feed((name,), None)
feed.begin(run, True)
for step in range(position, stop):
    more = {"texts": {"said": "said.txt"}} if step == 2 else {}
    values = {"loss": step / 2, "evaluation.error": 1.0}
    feed.offer({"event": "metrics", "time": 1.0e9 + step, "step": step, "metrics": values, **more})
feed.close()
"""
READ_WANDB = """
import json, struct
from pathlib import Path
from wandb.proto import wandb_internal_pb2

def records(data):  # the format of LevelDB's log, behind 7 bytes
    place, parts = 7, b""
    while len(data) - place > 7:
        left = 32768 - place % 32768
        size, kind = struct.unpack_from("<HB", data, place + 4)
        if left < 7 or kind == 0:
            place += left
            continue
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield parts
            parts = b""

for path in sorted(Path("trackers/one/wandb").glob("offline-run-*/*.wandb")):
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            print(json.dumps({"run": record.run.run_id}))
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            print(json.dumps({".".join(one.nested_key) or one.key: json.loads(one.value_json) for one in items}))
"""

Values = tuple[set[str], Counter[tuple[str, int, float]]]


def of_mlflow(folder: Path, output: Callable[..., str]) -> Values:
    with sqlite3.connect(folder / "trackers" / "mlflow.db") as store:
        rows = store.execute("select run_uuid, key, step, value from metrics").fetchall()
        settings = dict(store.execute("select key, value from params").fetchall())
    store.close()
    assert not (folder / "mlflow.db").exists()  # in the folder of the script
    assert settings == {"batch": "8", "environment.python": "3"}
    assert len(list((folder / "trackers" / "mlflow").rglob("said.txt"))) == 1
    return {row[0] for row in rows}, Counter((key, step, value) for _, key, step, value in rows)


def of_wandb(folder: Path, output: Callable[..., str]) -> Values:
    lines = [json.loads(line) for line in output(READ_WANDB).splitlines()]
    steps = [line for line in lines if "_step" in line]
    found = Counter((name, line["_step"], line[name]) for line in steps for name in line if name in NAMES)
    assert sum("said" in line or "said._type" in line for line in steps) == 1
    return {line["run"] for line in lines if "run" in line}, found


def of_comet(folder: Path, output: Callable[..., str]) -> Values:
    found: Counter[tuple[str, int, float]] = Counter()
    runs = set()
    for path in (folder / "trackers" / "one" / "comet").glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            runs.add(json.loads(archive.read("experiment.json"))["offline_id"])
            for line in archive.read("messages.json").decode().splitlines():
                message = json.loads(line)
                if message["type"] == "metric_msg" and message["payload"]["metric"]["metricName"] in NAMES:
                    metric = message["payload"]["metric"]
                    found[metric["metricName"], metric["step"], float(metric["metricValue"])] += 1
    return runs, found


def of_trackio(folder: Path, output: Callable[..., str]) -> Values:
    with sqlite3.connect(folder / "store" / "tests.db") as store:
        rows = store.execute("select run_name, step, metrics from metrics").fetchall()
    store.close()
    values = [(step, name, value) for _, step, text in rows for name, value in json.loads(text).items()]
    assert [value for _, name, value in values if name == "said"] == ["two words"]
    return {row[0] for row in rows}, Counter((name, step, value) for step, name, value in values if name in NAMES)


NAMES = "loss", "evaluation.error"
READERS = {"comet": of_comet, "mlflow": of_mlflow, "trackio": of_trackio, "wandb": of_wandb}
PACKAGES = {"comet": "comet_ml", "mlflow": "mlflow", "trackio": "trackio", "wandb": "wandb"}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_one_run_with_each_value_once(name: str, fork_server: ForkServer, tmp_path: Path) -> None:
    if find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed: paceline[{name}]")
    home = {
        "HOME": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "store"),
        "WANDB_MODE": "offline",
        "COMET_API_KEY": "",
        "MLFLOW_TRACKING_URI": "",
    }
    outside = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "COMET_INTERNAL_SENTRY_DSN": ""}

    def output(script: str, *arguments: Any) -> str:
        path, said = tmp_path / "script.py", tmp_path / "output"
        path.write_text(textwrap.dedent(script))
        command = Command((str(path), *map(str, arguments)), os.environ | home | outside, said, said, tmp_path)
        assert fork_server.run(command, 280) == 0, said.read_text()
        return said.read_text()

    said = output(SCRIPT, name, 0, 6) + output(SCRIPT, name, 4, 9)
    assert "failed" not in said and "did not finish" not in said
    runs, found = READERS[name](tmp_path, output)
    assert len(runs) == 1
    assert found == {(one, step, step / 2 if one == "loss" else 1.0): 1 for one in NAMES for step in range(9)}, said
    assert sys.modules.get(PACKAGES[name]) is None, "imported by nobody but the scripts"
