"""What ``paceline.horovod`` writes down, and what goes on after rank 0 has left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.testing.ranks import Ended

Run = Callable[..., list[Ended]]

SCRIPT = """
import os, time
import torch
import paceline.horovod.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
for _ in range(2):
    hvd.allreduce(torch.ones(3), name="first")  # HOROVOD_TIMELINE
hvd.start_timeline(os.environ["SECOND"], mark_cycles=True)
single = hvd.allreduce_async(torch.ones(2), name="same", op=hvd.Sum)  # groups have names of their own
group = hvd.grouped_allreduce_async([torch.ones(2), torch.ones(1)], name="same", op=hvd.Sum)
assert hvd.synchronize(single).tolist() == [size] * 2 and hvd.synchronize(group)[1].item() == size
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for _ in range(4):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
hvd.stop_timeline()
hvd.barrier()  # rank 0 writes down what others ask for until it stops itself
hvd.allreduce(torch.ones(1), name="after")

others = hvd.add_process_set([1, 2])
hvd.barrier()
if rank == 0:
    hvd.shutdown()
    print("left")
else:
    try:
        hvd.barrier()
        raise SystemExit("no error")
    except hvd.HorovodInternalError as error:
        assert "rank 0 has called shutdown" in str(error), error
    for turn in range(3):
        found = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=others, name=f"without 0 {turn}")
        assert found.item() == 2
        time.sleep(0.2)
    print("went on")
"""


def events(path: Path) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The events, and the rows by their names."""
    found = json.loads(path.read_text())
    return found, {one["args"]["name"]: one["pid"] for one in found[1:] if one.get("name") == "process_name"}


def test_operations_are_recorded_and_process_sets_outlive_rank_0(ranks: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    given = {"HOROVOD_TIMELINE": str(first), "SECOND": str(second), "HOROVOD_AUTOTUNE": "1", "HOROVOD_CYCLE_TIME": "1"}
    everyone = ranks(SCRIPT, 3, tmp_path, environment=given, deadline=120)
    for one in everyone:
        assert one.code == 0, one.err
    assert "left" in everyone[0].out and all("went on" in one.out for one in everyone[1:])
    assert "paceline.horovod: without effect here: HOROVOD_AUTOTUNE." in everyone[0].err

    written, rows = events(first)
    assert "start_time_since_epoch_in_micros" in written[0]["args"]
    row = [one for one in written if one["pid"] == rows["allreduce.first"] and one["ph"] != "M"]
    assert [one["ph"] for one in row] == ["B", "X", "X", "X", "E", "B", "E"] * 2
    assert [row[0]["name"], row[5]["name"]] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]
    assert {one["name"] for one in row if one["ph"] == "X"} == {"0", "1", "2"}
    assert row[6]["args"] == {"dtype": ["float32"], "shape": [[3]]}
    assert [one["ts"] for one in row] == sorted(one["ts"] for one in row)

    written, rows = events(second)
    assert {"allreduce.same", "grouped_allreduce.same", "allreduce.bias and 1 more"} <= rows.keys()
    assert "allreduce.after" not in rows and any(one.get("name") == "CYCLE_START" for one in written)
