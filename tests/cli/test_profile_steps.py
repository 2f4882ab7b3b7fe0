"""``profile_steps``: operators and kernels of a real run in its trace, inside of their step."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Run

from paceline.cli.main import main

SCRIPT = """
import torch, paceline
from functools import partial
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
session = paceline.start(
    model=torch.nn.Linear(8, 1), optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.mse_loss,
    data=data, batch=16, microbatches=4,
)
for batch in session.batches(steps=6):
    session.step(batch)
print(session.device.type)
"""
Slices = dict[tuple[str, str], list[tuple[str, int, int]]]


def decoded(path: Path) -> tuple[Slices, list[int], list[int]]:
    """Name, begin and end of the slices of each worker and track, and the flows that begin and end."""
    proto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace: Any = proto.Trace.FromString(path.read_bytes())
    about = {
        one.track_descriptor.uuid: one.track_descriptor for one in trace.packet if one.HasField("track_descriptor")
    }
    found, open_, begins, ends = defaultdict(list), defaultdict(list), list[int](), list[int]()
    for packet in trace.packet:
        event = packet.track_event
        if not packet.HasField("track_event"):
            continue
        track = about[event.track_uuid]
        begins += event.flow_ids
        ends += event.terminating_flow_ids
        if event.type == event.TYPE_SLICE_BEGIN:
            open_[event.track_uuid].append((event.name, packet.timestamp))
        elif event.type == event.TYPE_INSTANT:
            found[track.name, ""].append((event.name, packet.timestamp, packet.timestamp))
        elif event.type == event.TYPE_SLICE_END:
            found[about[track.parent_uuid].name, track.name].append((*open_[event.track_uuid].pop(), packet.timestamp))
    return found, begins, ends


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_operators_and_kernels_lie_inside_their_step(run: Run, device: str) -> None:
    workers = 1 if device == "cuda" else 2
    variables = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    ran = run(SCRIPT, "-n", workers, "--set", "profile_steps=3:5", deadline=300, **variables)
    assert ran.code == 0 and device in ran.logs["rank-0"], ran.report()
    with pytest.raises(SystemExit) as ended:
        main(["trace", str(ran.run)])
    assert not ended.value.code
    found, starts, stops = decoded(ran.run / "trace.pftrace")
    for rank in range(workers):
        ends = {name: end for name, _, end in found[f"rank {rank}", "steps"]}
        done = [end for name, _, end in found[f"rank {rank}", ""] if name == "profile"]
        between = [(ends[f"step {step - 1}"], end) for step, end in zip((3, 4), done, strict=True)]
        seen = [
            one for (worker, track), some in found.items() for one in some
            if worker == f"rank {rank}" and track.startswith(("operators", "GPU"))
        ]  # fmt: skip
        where = [[name for name, begin, end in seen if first <= begin and end <= last] for first, last in between]
        assert all("aten::addmm" in names for names in where)
        assert sum(map(len, where)) == len(seen), "the clocks of the profile and of the records differ"
    kernels = [one for (_, track), some in found.items() if track.startswith("GPU") for one in some]
    assert bool(kernels) == (device == "cuda")
    assert sorted(starts) == sorted(stops) and len({*starts}) == len(starts) and bool(starts) == bool(kernels)
