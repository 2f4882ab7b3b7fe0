"""``paceline trace``: slices that nest, flows that pair, and a file that Perfetto's own package reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.errors import InputError
from paceline.observe.tracing.kernels import profiled_slices
from paceline.observe.tracing.slices import Slice, apart, workers_of

SECOND = 10**9


def record(event: str, rank: int | str, end: float, **more: Any) -> dict[str, Any]:
    return {"time": end, "event": event, "rank": rank, "generation": 0, **more}


def sent(step: int, sender: int, end: float) -> list[dict[str, Any]]:
    """A stage's output on its way to the stage beside it."""
    known = {"step": step, "microbatch": 3, "seconds": 0.25, "bytes": 64}
    receiver = 1 - sender
    return [
        record("send", sender, end, stage=sender, peer=receiver, **known),
        record("receive", receiver, end + 0.5, stage=receiver, peer=sender, **known),
    ]


RECORDS = [
    *(record("step", rank, 8.0, step=7, seconds=4.0, loss=2.5, samples_per_second=64.0) for rank in range(2)),
    record("forward", 0, 5.0, step=7, stage=0, microbatch=3, seconds=0.5),
    *sent(7, 0, 5.5),
    *sent(7, 1, 6.5),
    sent(8, 0, 9.0)[0],  # its other end is not there
    record("exchange", 0, 7.0, step=7, bucket=0, seconds=2.0),
    record("exchange", 0, 7.5, step=7, bucket=1, seconds=1.0),
    record("lost", "launcher", 7.75, worker=1, reason="it ended \ud800"),
    record("shares", 0, 7.75, seconds=[1.0, 2.0], counts=[3, 5]),
]


def test_each_worker_has_tracks_of_its_own() -> None:
    workers = workers_of(RECORDS)
    assert list(workers) == ["launcher", "rank 0", "rank 1"]
    tracks = workers["rank 0"].tracks
    assert {name: [one.name for one in track] for name, track in tracks.items()} == {
        "compute": ["forward stage 0 microbatch 3"],
        "exchange": ["exchange 0"],
        "exchange 2": ["exchange 1"],
        "receive": ["receive stage 0 microbatch 3"],
        "send": ["send stage 0 microbatch 3"] * 2,
        "steps": ["step 7"],
    }
    step = tracks["steps"][0]
    assert (step.begin, step.end, step.values["loss"]) == (4 * SECOND, 8 * SECOND, 2.5)
    assert workers["rank 1"].counters["loss"] == [(8 * SECOND, 2.5)]
    assert [one.name for one in workers["launcher"].instants] == ["lost"]
    assert [one.name for one in workers["rank 0"].instants] == ["shares"], "its seconds are not those of an operation"


def test_flows_go_from_a_send_to_its_receive() -> None:
    workers = workers_of(reversed(RECORDS))
    begins = {one.sends: one.end for worker in workers.values() for one in worker.tracks.get("send", ())}
    ends = {one.receives: one.end for worker in workers.values() for one in worker.tracks.get("receive", ())}
    assert set(begins) - set(ends) == {None}, "of a send without its receive"
    assert {flow: ends[flow] - begins[flow] for flow in ends} == dict.fromkeys(ends, SECOND // 2) and len(ends) == 2


def test_slices_of_a_track_nest() -> None:
    draw = random.Random(0)
    slices = []
    for place in range(300):
        begin = draw.randrange(100)
        slices.append(Slice(str(place), begin, begin + draw.randrange(20), {}))
    tracks = apart(slices)
    assert sorted(one.name for track in tracks for one in track) == sorted(one.name for one in slices)
    for track in tracks:
        for place, one in enumerate(track):
            for other in track[place + 1 :]:
                assert one.begin <= other.begin and (other.begin >= one.end or other.end <= one.end)


def test_kernels_are_on_the_clock_of_the_records(tmp_path: Path) -> None:
    """The machine's clock is 2 s behind. A launch has a flow to its first kernel, even to an earlier one."""
    launch = {"ph": "X", "cat": "cuda_runtime", "pid": 9, "tid": 9, "name": "cudaLaunchKernel", "dur": 5.0}
    kernel = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "name": "sgemm", "dur": 40.0}
    found = [
        {**launch, "ts": 2e6, "args": {"correlation": 3}},
        {**launch, "ts": 2e6 + 1, "tid": 10, "args": {"correlation": 4}},  # of another thread, without a kernel
        {"ph": "X", "cat": "cpu_op", "pid": 9, "tid": 9, "ts": 2e6 - 10.25, "dur": 100.0, "name": "aten::mm"},
        {**kernel, "ts": 2e6 - 1, "args": {"correlation": 3, "stream": 7}},
        {**kernel, "ts": 2e6 + 50, "args": {"correlation": 3}},  # the second one of a graph
        {"ph": "X", "cat": "gpu_user_annotation", "pid": 0, "tid": 7, "ts": 2e6, "dur": 1.0, "name": "again"},
        {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "python"}},
    ]
    (tmp_path / "profiles").mkdir()
    path = tmp_path / "profiles" / "step-3-rank-1.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": SECOND, "traceEvents": found}))
    done = record("profile", 1, 6.0, step=3, clock=4.0, path="/elsewhere", text="a table")
    late = {**done, "step": 9, "time": 9.0}  # its file is not there
    slices = list(profiled_slices([tmp_path / "none", tmp_path], [{**done, "clock": 3.0}, done, late]))
    assert [(rank, track, one.name, one.begin - 5 * SECOND) for rank, track, one in slices] == [
        (1, "operators", "cudaLaunchKernel", 0),
        (1, "operators 2", "cudaLaunchKernel", 1000),
        (1, "operators", "aten::mm", -10_250),
        (1, "GPU 0 stream 7", "sgemm", -1000),
        (1, "GPU 0 stream 7", "sgemm", 50_000),
    ]
    assert [one.sends for _, _, one in slices] == [1 << 32, None, None, None, None]
    assert [one.receives for _, _, one in slices] == [None, None, None, 1 << 32, None]
    assert list(workers_of(RECORDS, slices)["rank 1"].tracks)[:3] == ["GPU 0 stream 7", "operators", "operators 2"]
    path.write_text("[]")
    with pytest.raises(InputError, match=r"step-3-rank-1\.json cannot be read"):
        list(profiled_slices([tmp_path], [done]))


def test_the_file_is_read_by_perfetto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    events = tmp_path / "runs" / "one" / "events"
    events.mkdir(parents=True)
    for one in RECORDS:
        name = f"rank-{one['rank']}" if isinstance(one["rank"], int) else one["rank"]
        with (events / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(one) + "\n")
    run = str(events.parent)

    def traced(*words: str) -> str:
        with pytest.raises(SystemExit):
            main(["trace", run, *words])
        return "".join(capsys.readouterr())

    (events.parent / "trace.pftrace").symlink_to(tmp_path / "other")
    assert "10 slices of launcher, rank 0, rank 1" in traced()
    assert not (tmp_path / "other").exists(), "a link in the folder of a run is not followed"
    trace = proto.Trace.FromString((events.parent / "trace.pftrace").read_bytes())
    tracks = {
        one.track_descriptor.uuid: one.track_descriptor for one in trace.packet if one.HasField("track_descriptor")
    }
    assert {tracks[one.parent_uuid].name for one in tracks.values() if one.parent_uuid} == {"rank 0", "rank 1"}
    found = [(one.timestamp, one.track_event) for one in trace.packet if one.HasField("track_event")]
    assert {one.track_uuid for _, one in found} <= set(tracks)
    depth = dict.fromkeys(tracks, 0)
    for _, one in found:
        depth[one.track_uuid] += {one.TYPE_SLICE_BEGIN: 1, one.TYPE_SLICE_END: -1}.get(one.type, 0)
        assert depth[one.track_uuid] >= 0
    assert not any(depth.values())
    flows = [(one.flow_ids, one.terminating_flow_ids) for _, one in found]
    assert (
        sorted(flow for ids, _ in flows for flow in ids) == sorted(flow for _, ids in flows for flow in ids) == [1, 2]
    )
    (lost,) = [one for _, one in found if one.name == "lost"]
    assert {one.name: one.string_value or one.int_value for one in lost.debug_annotations} == {
        "worker": 1,
        "reason": "it ended ?",
    }
    assert "1 slices of rank 0" in traced("--step", "8", "--output", str(tmp_path / "a"))
    assert "has no records of the steps 900:901" in traced("--step", "900:901")
    assert "cannot be written" in traced("--output", str(tmp_path / "no" / "a"))
