"""The simulation of a step, the programs of the strategies, and the choice between them."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline import config
from paceline.cli.display.alerts import predicted
from paceline.comm.reduction.buckets import Layout as BucketLayout
from paceline.comm.reduction.buckets import pack, split
from paceline.environments import env
from paceline.errors import ConfigError, InputError
from paceline.launchers.base import Request
from paceline.planning import profile as profiling
from paceline.planning import trials
from paceline.planning.costs import Profile, Work, write
from paceline.planning.memory import Run, Segment, need
from paceline.planning.programs import asynchronous, data_parallel, pipeline
from paceline.planning.query import Query
from paceline.planning.reductions import Updaters, buckets_of
from paceline.planning.search import Candidate, Layout, Measured, best, candidates, explained, front
from paceline.planning.simulate import Compute, Exchange, Machine, Place, Program, Send, Simulation, Step, Wait
from paceline.schedule import slices
from paceline.schedule.balance import LayerCost
from paceline.schedule.link_shares import full, window_bytes
from paceline.schedule.pipeline import clock
from paceline.schedule.pipeline.choice import synchronous_schedule
from paceline.settings import PipelineSettings


def program(*steps: Step) -> Program:
    yield from steps


def times(machines: list[Machine], places: list[int], *programs: Program) -> dict[int, float]:
    return Simulation(machines, places).run(dict(enumerate(programs))).ends


def layers(count: int, megabytes: float = 1.0, forward: float = 1e-3) -> tuple[LayerCost, ...]:
    return tuple(LayerCost(str(one), forward, 2 * forward, 1000, int(megabytes * 1e6), 500) for one in range(count))


def test_computing_sending_and_waiting_take_their_time() -> None:
    slow = Machine(bytes_per_second=100.0, latency=0.5)
    ends = times(
        [slow, slow],
        [0, 1],
        program(Compute(1), Send(1, "a", 300), Compute(1)),  # the link works while the sender computes
        program(Wait("a"), Compute(1)),
    )
    assert ends == {0: 2.0, 1: pytest.approx(1 + 3 + 0.5 + 1)}


def test_a_link_carries_one_transfer_after_another() -> None:
    machines = [Machine(bytes_per_second=100.0), Machine(), Machine()]
    ends = times(
        machines, [0, 1, 2], program(Send(1, "a", 100), Send(2, "b", 100)), program(Wait("a")), program(Wait("b"))
    )
    assert ends == {0: 0.0, 1: 1.0, 2: 2.0}


def test_workers_divide_the_cores_of_their_machine() -> None:
    given = [program(Compute(1)), program(Compute(1)), program(Compute(2)), program(Compute(2, load=0))]
    ends = times([Machine(cores=2)], [0] * 4, *given)
    assert ends == {0: pytest.approx(1.5), 1: pytest.approx(1.5), 2: pytest.approx(2.5), 3: 2.0}  # the last one sleeps


def test_an_exchange_waits_for_the_last_worker() -> None:
    both = (0, 1)
    ends = times(
        [Machine(bytes_per_second=10.0)] * 2,
        [0, 1],
        program(Exchange(both, "x", 10, 10), Wait("x")),
        program(Compute(3), Exchange(both, "x", 10, 10), Wait("x")),
    )
    assert ends == {0: 4.0, 1: 4.0}


def test_programs_that_wait_for_nobody_are_refused() -> None:
    with pytest.raises(InputError, match="worker 0 waits for a, which no worker sends"):
        times([Machine()], [0], program(Wait("a")))


@pytest.mark.parametrize(("workers", "shared"), [(2, 1.0), (4, 1.0), (5, 1.0), (2, 0.5), (3, 0.5)])
def test_an_all_reduce_carries_the_bytes_of_a_ring(workers: int, shared: float) -> None:
    work = Work({1: layers(40, megabytes=1.0, forward=0.0)}, workers, message_seconds=0.0)
    place = Place((Machine(bytes_per_second=1e6, shared=shared),) * workers, tuple(range(workers)))
    ran = Simulation(place.machines, place.of_worker).run(
        {rank: data_parallel(work, place, rank, 0) for rank in range(workers)}
    )
    slower = 1.0 if workers == 2 else shared
    assert ran.seconds == pytest.approx(2 * (workers - 1) / workers * 40 / slower, rel=0.01)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb-h1"])
def test_a_pipeline_takes_the_time_of_its_schedules_clock(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.planning.programs._HEADER_BYTES", 0)
    stages, microbatches = 3, 6
    costs = layers(stages, forward=0.01)
    work = Work({1: costs}, microbatches, message_seconds=0.0)
    schedule = synchronous_schedule(PipelineSettings(schedule=kind, stages=stages), stages, microbatches)
    place = Place((Machine(bytes_per_second=1e5),) * stages, tuple(range(stages)))
    bounds = [(stage, stage + 1) for stage in range(stages)]
    ran = Simulation(place.machines, place.of_worker).run(
        {rank: pipeline(work, place, rank, 0, schedule, bounds) for rank in range(stages)}
    )
    nothing = (0.0,) * stages
    forward = tuple(one.forward for one in costs)
    halves = (0.0, *forward[1:]), (2 * forward[0], *forward[1:])  # the first stage needs no gradient for its input
    expected = clock.simulate(schedule, clock.Times(forward, *halves, (0.01,) * 2, nothing, nothing))
    assert ran.seconds == pytest.approx(expected.seconds, abs=0.0101)  # both neighbors get messages over one link


@pytest.mark.parametrize(("kind", "whole", "halves"), [("1f1b", 4, 0), ("zb-h1", 2, 3)])
def test_a_pass_and_a_message_keep_a_worker_busy(kind: str, whole: int, halves: int) -> None:
    """The second stage sends after the first half of its backward pass."""
    schedule = synchronous_schedule(PipelineSettings(schedule=kind, stages=2), 2, 1)

    def seconds(**more: float) -> float:
        work = Work({1: layers(2)}, 1, **{"message_seconds": 0.0, **more})
        programs = {
            rank: pipeline(work, Place((Machine(),) * 2, (0, 1)), rank, 0, schedule, [(0, 1), (1, 2)])
            for rank in range(2)
        }
        return Simulation((Machine(),) * 2, (0, 1)).run(programs).seconds

    busy = {"message_seconds": 0.01, "pass_seconds": 0.1, "half_pass_seconds": 1.0}
    assert seconds(**busy) - seconds() == pytest.approx(4 * 0.01 + whole * 0.1 + halves)


def test_equal_pipelines_are_simulated_once_and_exchange_their_gradients() -> None:
    bounds = [(0, 1), (1, 2)]
    work = Work({1: layers(2, megabytes=3.0, forward=0.0)}, 2, message_seconds=0.0)
    schedule = synchronous_schedule(PipelineSettings(schedule="1f1b", stages=2), 4, 2)  # two pipelines
    machines = (Machine(bytes_per_second=1e6),) * 4

    def seconds(place: Place) -> float:
        ran = Simulation(place.machines, place.of_worker).run(
            {rank: pipeline(work, place, rank, 0, schedule, bounds) for rank in range(4)}
        )
        return ran.seconds

    assert seconds(Place(machines, (0, 1, 2, 3))) == pytest.approx(2 * (1 / 2) * 3, abs=0.01)
    assert seconds(Place(machines, (0, 1, 2, 3) * 3, (0, 1, 2, 3))) == pytest.approx(2 * (5 / 6) * 3, abs=0.01)


@pytest.mark.parametrize("megabytes", [[0.25] * 6 + [8, 8], [3, 1, 12, 0.5], [40] + [1] * 20])
def test_owners_get_the_buckets_of_training(megabytes: list[float]) -> None:
    workers, element = 4, 4
    tensors = [torch.empty(int(one * 2**20) // element) for one in reversed(megabytes)]
    owned = slices.even([one.numel() for one in tensors], split(tensors, full(workers)), workers)
    layout = BucketLayout(full(workers), [1 / workers] * workers, homes=[one.owner for one in owned], windowed=True)
    made = pack([tensors[one.parameter][one.start : one.stop] for one in owned], layout, layout.bucket_bytes)
    costs = [LayerCost("", 0.0, 0.0, 0, int(one * 2**20), 0) for one in megabytes]
    found = buckets_of(costs, full(workers), workers, windowed=True)
    assert [(one.nbytes, one.home, one.after) for one in found] == [(one.nbytes, one.home, one.after) for one in made]


def test_a_gradient_waits_for_the_memory_of_an_earlier_bucket() -> None:
    costs = [LayerCost("", 0.0, 0.02, 0, int(one * 2**20), 0) for one in [0.25] * 6 + [8, 8]]
    place = Place((Machine(bytes_per_second=2.5e7),) * 4, (0, 1, 2, 3))
    work = Work({1: tuple(costs)}, 4, core_load=0.0)

    def seconds(windowed: bool) -> float:
        owners = Updaters(4, windowed=windowed)
        programs = {rank: data_parallel(work, place, rank, 0, owners=owners) for rank in range(4)}
        return Simulation(place.machines, place.of_worker).run(programs).seconds

    assert seconds(windowed=True) > 1.05 * seconds(windowed=False)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("resnet-101", "gpt-175b")]


@pytest.mark.parametrize("name", ["amoebanet", *SLOW])
def test_the_page_has_the_predictions_of_published_tables(name: str) -> None:
    root = Path(__file__).resolve().parents[2]
    bench = runpy.run_path(str(root / "bench/plan/published/__main__.py"))
    text = (root / "docs/plan-published.md").read_text()
    lines, _ = bench["table"](name)
    assert "\n".join(lines) in text
    errors = [abs(float(one)) for one in re.findall(r"\| ([+-][0-9.]+)% \|$", text, re.MULTILINE)]
    assert f"Mean error of {len(errors)} rows: {sum(errors) / len(errors):.1f}%" in text


def test_workers_that_do_the_same_are_simulated_once() -> None:
    work = Work({1: layers(6)}, 12, update=0.001)
    place = Place((Machine(bytes_per_second=1e8),) * 8, tuple(range(8)))
    folded = place.folded(12)
    assert len(folded.group) == 2  # shares of two and of one microbatch

    def seconds(of: Place) -> float:
        ran = Simulation(of.machines, of.of_worker).run({rank: data_parallel(work, of, rank, 0) for rank in of.group})
        return ran.seconds

    assert seconds(folded) == pytest.approx(seconds(place))


def test_passes_over_more_microbatches_are_on_a_line_between_measured_ones() -> None:
    work = Work({1: layers(1, forward=1.0), 4: layers(1, forward=2.5)}, 8)
    assert [work.layers(count)[0].forward for count in (1, 2, 4, 8)] == [1.0, 1.5, 2.5, 4.5]


def _measured(**changes: Any) -> Measured:
    costs = layers(4, megabytes=4.0)
    sizes = Run(16_000_000, 16_000_000, 32_000_000, 16_000_000, (), 32, 8)
    profile = Profile("Net", 4, 8, None, {1: costs}, 1.0, 0.001, 0.0, 32, 100, False, sizes, "")
    return Measured(Work({1: costs}, 8, update=0.001, **changes), profile, 0.05)


def _found(layout: Layout, *counts: int, convergent: bool = False) -> list[Candidate]:
    return list(candidates({1: _measured()}, layout, counts, exact=False, convergent=convergent))


def test_a_slow_link_favours_pipelines_and_a_fast_one_data_parallel_training() -> None:
    def first(rate: float, **more: bool) -> str:
        return best(_found(Layout(Machine(bytes_per_second=rate, latency=1e-4), 1), 4, **more))[0].strategy

    assert first(1e7) == "pipeline"
    assert first(1e11) in ("allreduce", "sharded")
    assert first(1e6, convergent=True) in ("pipeline", "diloco")
    offered = {one.strategy for one in _found(Layout(Machine(), 1), 4)}
    assert offered == {"allreduce", "sharded", "parameter-server", "pipeline"}


def test_uneven_machines_get_uneven_shares_and_stages() -> None:
    fast, slow = Machine(bytes_per_second=1e10), Machine(bytes_per_second=1e10, speed=0.25)
    found = _found(Layout(slow, 1, others=(fast, fast)), 3)
    taken = {(one.strategy, one.settings.get("shard", "")): one.step_seconds for one in found}
    # 8 microbatches of 12 ms: shares of 3, 3 and 2, of which the first takes 144 ms; stealing shares 1, 4 and 3
    assert taken["allreduce", ""] == pytest.approx(0.144, rel=0.1)
    assert taken["stealing", ""] == pytest.approx(0.048, rel=0.2)
    cuts = {tuple(one.settings["pipeline"]["cut"]) for one in found if one.strategy == "pipeline"}
    assert cuts == {("1", "2")} or cuts == {("1", "3")}, "the slow machine has one of four layers"
    slow_link = _found(Layout(replace(fast, bytes_per_second=2e7), 1, others=(fast, fast, fast)), 4)
    alike = _found(Layout(replace(fast, bytes_per_second=2e7), 1), 4)
    assert slow_link[0].step_seconds < 0.9 * alike[0].step_seconds, "the slow machine adds up less"


@pytest.mark.parametrize(
    ("servers", "copied", "seconds"), [(1, False, 16), (2, False, 10), (4, False, 6), (1, True, 20), (2, True, 12)]
)
def test_asynchronous_servers_give_and_take_over_their_links(servers: int, copied: bool, seconds: float) -> None:
    work = Work({1: layers(4, megabytes=1.0, forward=0.0)}, 4)
    place = Place((Machine(bytes_per_second=1e6),) * 4, (0, 1, 2, 3))
    ends = (
        Simulation(place.machines, place.of_worker)
        .run({rank: asynchronous(work, place, rank, 0, servers, copied) for rank in range(4)})
        .ends
    )
    assert max(ends.values()) == pytest.approx(seconds, rel=0.01)  # the last one pulls after all others, and pushes


def test_a_copy_gets_means_when_it_has_sent_its_own_sums() -> None:
    work = Work({1: layers(8, megabytes=4.0, forward=0.0)}, 2, message_seconds=0.0)
    place = Place((Machine(bytes_per_second=1e6),) * 2, (0, 1))
    programs = {rank: data_parallel(work, place, rank, 0, owners=Updaters(1, 1, whole=True)) for rank in range(2)}
    assert Simulation(place.machines, place.of_worker).run(programs).seconds == pytest.approx(32 + 32, rel=0.01)


def test_links_lose_time_where_a_worker_has_several_peers_on_other_machines() -> None:
    work = Work({1: layers(8, megabytes=4.0, forward=0.0)}, 4, message_seconds=0.0)
    place = Place((Machine(bytes_per_second=1e6, shared=0.5),) * 2, (0, 0, 1, 1))

    def seconds(owners: Updaters | None) -> float:
        programs = {rank: data_parallel(work, place, rank, 0, owners=owners) for rank in range(4)}
        return Simulation(place.machines, place.of_worker).run(programs).seconds

    assert seconds(None) == pytest.approx(32, rel=0.1), "each worker has one peer"
    assert seconds(Updaters(4)) == pytest.approx(2 * (32 + 32), rel=0.1)
    # weights go to one worker
    assert seconds(Updaters(4, shared=True)) == pytest.approx(2 * 32 + 16, rel=0.1)


def test_weights_go_to_one_worker_of_each_other_machine_if_it_shares_them() -> None:
    work = Work({1: layers(8, megabytes=4.0, forward=0.0)}, 4, message_seconds=0.0)
    place = Place((Machine(bytes_per_second=1e6),) * 2, (0, 0, 1, 1))

    def seconds(**more: Any) -> float:
        owners = Updaters(4, **more)
        programs = {rank: data_parallel(work, place, rank, 0, owners=owners) for rank in range(4)}
        return Simulation(place.machines, place.of_worker).run(programs).seconds

    gathered, megabytes = seconds(), 8 * 4.0
    # each of two workers gets its own half of the gradients from two others, and all weights of the other machine
    assert gathered == pytest.approx(megabytes + megabytes, rel=0.1)
    assert seconds(shared=True) == pytest.approx(megabytes + megabytes / 2, rel=0.1)


def test_pipelines_with_replicas_are_offered() -> None:
    stages = [
        len(one.settings["pipeline"]["cut"]) + 1
        for one in _found(Layout(Machine(), 1), 4)
        if "pipeline" in one.settings
    ]
    assert stages == [2, 2, 4, 4]


def test_links_and_speeds_of_machines_must_be_as_many() -> None:
    unknown = {**dict.fromkeys(field.name for field in fields(Query)), "workers": 0, "latency": 0.2, "spot": False}
    given = {**unknown, "tolerance": "rounding"}
    with pytest.raises(ConfigError, match=r"link of 2, speeds of 3\. Give a value for each machine"):
        Query(**{**given, "link": (100.0, 1000.0), "speeds": (1.0, 1.0, 0.5)})
    with pytest.raises(ConfigError, match="give their link, too"):
        Query(**{**given, "link": (), "speeds": (1.0, 0.5)})
    with pytest.raises(ConfigError, match="speeds 0: give a finite number above 0"):
        Query(**{**given, "link": (100.0,), "speeds": (1.0, 0)})


def test_what_does_not_fit_is_no_choice() -> None:
    found = _found(Layout(Machine(), 8, memory_bytes=50e6), 1, 4)
    assert {one.strategy for one in best(found)} == {"sharded", "pipeline"}
    assert all(one.fits for one in front(found))
    with pytest.raises(ConfigError, match=r"Nothing fits .* the least is .* on 4 workers"):
        best([replace(one, fits=False) for one in found])


def test_the_memory_is_that_of_a_run_with_as_many_workers() -> None:
    found = _found(Layout(Machine(), 1), 4, convergent=True)
    sizes = _measured().profile.sizes
    window = min(sizes.gradients, window_bytes(4, shared=False))
    gradients = next(one for one in found if one.settings.get("shard") == "gradients")
    inbox = window * 3 // 4  # for the sums of three other machines
    assert gradients.memory_bytes == need(replace(sizes, workers=4, stage=2, window=window)).total + inbox
    copied = replace(_measured(), profile=replace(_measured().profile, shard_copy=True))
    found_copies = candidates({1: copied}, Layout(Machine(), 1), [4], exact=False, convergent=False)
    gradients = next(one for one in found_copies if one.settings.get("shard") == "gradients")
    assert gradients.memory_bytes == need(replace(sizes, workers=4, stage=2, window=window, holders=2)).total + inbox
    within = replace(copied.profile, shard_within="machine")
    assert [within.holders(machines, 4) for machines in (1, 2, 4)] == [2, 2, 4]
    held = next(one for one in found if one.strategy == "diloco")
    replica = replace(sizes, workers=4, weights=sizes.weights + sizes.gradients)
    outer = 3 * sizes.gradients  # momentum, and the buffers of outer gradients and means
    inbox = 3 * sizes.gradients // 4
    assert held.memory_bytes == need(replica).total + outer + inbox
    assert found[0].memory_bytes == need(replace(sizes, workers=4)).total + inbox
    paired = next(candidates({1: _measured()}, Layout(Machine(), 2), [4], exact=False, convergent=False))
    assert paired.memory_bytes == need(replace(sizes, workers=4)).total + sizes.gradients // 4, "half of one machine's"
    uneven = next(candidates({1: _measured()}, Layout(Machine(), 4), [5], exact=False, convergent=False))
    assert uneven.memory_bytes == need(replace(sizes, workers=5)).total + sizes.gradients // 2, "of the lone worker"


@pytest.mark.parametrize("per_machine", [1, 4])
def test_a_server_holds_two_versions_and_what_all_workers_send(per_machine: int) -> None:
    measured = _measured(fused=True)
    sizes = replace(measured.profile.sizes, segments=(Segment("", 1_000_000),))
    fused = replace(measured, profile=replace(measured.profile, sizes=sizes))
    layout = Layout(Machine(), per_machine)
    found = {
        (one.strategy, *one.settings): one.tensor_bytes
        for one in candidates({1: fused}, layout, [4], exact=False, convergent=True)
    }
    alone, state = need(replace(sizes, workers=4), fused=True).total, 2 * sizes.weights + 2 * sizes.optimizer
    parts = 3 * sizes.gradients  # of the three others. Shared pages count for those who write and for those who read.
    of_server = state + parts if per_machine == 1 else state - 3 * sizes.weights // 2 + parts // 2
    assert found["parameter-server",] == alone + of_server
    whole_batch = need(replace(sizes, workers=4, even_shares=False), fused=True).total
    assert whole_batch == alone + 6_000_000  # 8 microbatches in place of 2
    copies = 2 if per_machine == 1 else 1
    assert found["parameter-server", "server"] == whole_batch + copies * state // 4


def test_the_memory_is_that_of_the_process_with_freed_memory_or_of_its_first_step() -> None:
    profile, process = replace(_measured().profile, process_bytes=100_000_000), 100_000_000
    tensors = _found(Layout(Machine(), 1), 1)[0].tensor_bytes

    def planned(most: int | None, first: int = 0) -> list[Candidate]:
        measured = trials._fitted(profile, trials.Trial([1.0] * 4, False, most, first), workers=1, cores=1)
        return list(candidates({1: measured}, Layout(Machine(), 4), [1, 4], exact=False, convergent=False))

    found = planned(process + tensors + 7)
    assert found[0].memory_bytes == process + tensors + 7
    assert {one.strategy for one in found} == {"allreduce", "sharded", "parameter-server", "pipeline"}
    for one in found:  # sharded training keeps no freed memory
        assert one.memory_bytes == process + one.tensor_bytes + (0 if one.strategy == "sharded" else 7)
    for one in planned(process + 900_000_000, process + 800_000_000):
        divided = 12_000_000 if one.settings.get("shard") == "parameters" else 0  # three quarters of the weights
        least = 800_000_000 - divided if one.strategy == "sharded" else 900_000_000 - tensors + one.tensor_bytes
        assert one.memory_bytes == process + max(least, 800_000_000 - divided)
    assert all(one.memory_bytes == process + one.tensor_bytes for one in planned(None))


def test_the_first_step_of_sharded_training_has_its_sums_and_means() -> None:
    measured = _measured()
    sizes = replace(measured.profile.sizes, workers=2)
    known = replace(measured, profile=replace(measured.profile, sizes=sizes), first_bytes=900_000_000)
    found = candidates({1: measured, 2: known}, Layout(Machine(), 4), [4], exact=False, convergent=False)
    held = {one.settings["shard"]: one.memory_bytes for one in found if one.strategy == "sharded"}
    window, means = min(sizes.gradients, window_bytes(4, shared=True)), sizes.gradients // 4
    divided = 900_000_000 - sizes.gradients + window + means  # in place of the sums of all gradients
    assert held == {
        "optimizer": 900_000_000,
        "gradients": divided,
        "parameters": divided - sizes.weights * 3 // 4,
    }


def test_a_budget_of_memory_is_not_taken_for_the_memory_of_a_trial() -> None:
    def start(request: Request) -> None:
        assert request.runs is not None
        folder = Path(request.runs, "run", "events")
        folder.mkdir(parents=True)
        told: list[dict[str, Any]] = [{"event": "step", "time": float(step)} for step in range(10)]
        told += [{"event": "memory", "limit": 9, "predicted": 8}, {"event": "memory", "predicted": 8, "reached": 7}]
        told += [{"event": "memory", "after": after, "reached": size} for after, size in ((0, 3), (5, 4))]
        lines = (json.dumps({"time": 0.0, "rank": 0, "generation": 0, **one}) for one in told)
        (folder / "rank-0.jsonl").write_text("".join(f"{line}\n" for line in lines))

    trial = trials.steps_of(Request(Path("train.py"), ()), 1, {}, start)
    assert trial == trials.Trial([1.0] * 6, False, 4, 3)


def test_all_measured_costs_are_scaled_if_steps_take_less() -> None:
    costs = {"update_seconds": 0.02, "add_seconds": 0.03, "message_seconds": 0.04}
    profile = replace(_measured().profile, **costs, pass_seconds=0.05, half_pass_seconds=0.06)
    whole = trials._fitted(profile, trials.Trial([100.0] * 4, False, None), workers=2, cores=2)
    step = 100.0 - whole.work.overhead
    half = trials._fitted(profile, trials.Trial([step / 2] * 4, False, None), workers=2, cores=2)
    names = "update", "add", "message_seconds", "pass_seconds", "half_pass_seconds"
    found = [getattr(half.work, name) / getattr(whole.work, name) for name in names]
    layers = [
        now.forward / before.forward for now, before in zip(half.work.layers(1), whole.work.layers(1), strict=True)
    ]
    assert found + layers == pytest.approx([0.5] * (len(found) + len(layers))) and half.work.overhead == 0.0


def test_a_pipeline_that_cannot_be_measured_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(profiling._log, "warning", lambda text, *given: told.append(text % given))
    context: Any = SimpleNamespace(compute=SimpleNamespace(batch_loss=None))  # has no settings
    assert profiling._pass_seconds(context, layers(2)) == (0.0, 0.0)
    assert "without the overhead of a pass: AttributeError: " in told[0]


def test_epochs_of_a_stream_are_refused_after_the_first_profile(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    started: list[Request] = []

    def start(request: Request) -> None:
        started.append(request)
        write(replace(_measured().profile, steps_per_epoch=None), Path(request.environment[env.PROFILE]))

    unknown = dict.fromkeys(field.name for field in fields(Query))
    query = Query(
        **{
            **unknown,
            "workers": 2,
            "link": (),
            "speeds": (),
            "latency": 0.2,
            "tolerance": "rounding",
            "epochs": 2.0,
            "spot": False,
        }
    )
    with pytest.raises(ConfigError, match="the data are a stream"):
        query.candidates(Request(tmp_path / "train.py"), start)
    assert len(started) == 1


def test_the_front_has_the_fastest_and_the_cheapest() -> None:
    found = _found(Layout(Machine(bytes_per_second=1e8), 1), 1, 2, 4)
    kept = front(found)
    assert best(found)[0] in kept and min(found, key=lambda one: one.workers * one.step_seconds) in kept
    lines = explained(best(found))
    assert lines[0].startswith("The fastest is ") and "times as fast as one worker" in lines[0]
    assert any("waits" in line for line in lines[1:])


def test_a_saved_plan_gives_settings_and_workers(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved = {"strategy": "pipeline", "workers": 2, "settings": {"pipeline": {"cut": ["1"]}}, "step_seconds": 0.1}
    path.write_text(json.dumps(saved))
    assert config.read_plan(path) == {"strategy": "pipeline", "pipeline.cut": ["1"]}
    assert config.saved_plan(path) == (2, 1, None)
    assert config.saved_plan(None) is config.saved_plan(tmp_path / "plan.toml") is None
    path.write_text(json.dumps(saved | {"high": 0.0432, "machine": "this machine"}))
    planned = config.saved_plan(path)
    assert predicted(planned, 2) == ["steps > 43.200ms"]
    assert predicted(planned, 4) == predicted(None, 2) == []
    path.write_text(json.dumps(saved | {"high": 0.0432, "machine": "g5.xlarge"}))
    assert predicted(config.saved_plan(path), 2) == []
    path.write_text(json.dumps(saved | {"script": "train.py"}))
    assert config.saved_plan(path, tmp_path / "train.py") == (2, 1, None)
    with pytest.raises(ConfigError, match=r"is for 'train.py', and this script is 'other.py'"):
        config.saved_plan(path, tmp_path / "other.py")
    others = (
        "[1]",
        json.dumps(saved | {"workers": "2"}),
        json.dumps(saved | {"workers": 0}),
        json.dumps({"settings": {}}),
    )
    for text, message in (*((one, "not from paceline plan --save") for one in others), ("{", "is not JSON")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            config.saved_plan(path)
