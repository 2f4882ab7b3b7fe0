"""``paceline why``: the worker, the stage or the part of a step to which the lost time belongs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.cli.main import main
from paceline.comm.waiting import Waiting
from paceline.coordinator.types import Membership
from paceline.observe.index import RecordIndex, Search
from paceline.observe.records import Record
from paceline.observe.why import EVENTS, at_end, find
from paceline.observe.why.advice import Advice
from paceline.observe.why.at_end import find_at_end, last_line
from paceline.observe.why.culprits import Findings, explain
from paceline.observe.why.text import sentences
from paceline.observe.why.times import Times
from paceline.settings import Settings
from paceline.step.optimizer import OptimizerStep, Scaling
from paceline.training.build import Components
from paceline.training.setup import _accepted

Printed = Callable[..., list[dict[str, Any]]]
STEPS, MANY_STEPS = 20, 200
ALLREDUCE = {"strategy": "allreduce", "wire": "float32", "latency": 0.0, "checkpoint.every": 5}
ALLREDUCE["accepts"] = ["strategy=stealing", "wire=bfloat16", "checkpoint.every=auto"]


def step_of(own: list[Times], exchange: float = 0.05) -> dict[int, Times]:
    """A synchronous step: all end it together, after an exchange."""
    end = max(times.own for times in own) + exchange
    return {rank: times._replace(awaited=end - times.own) for rank, times in enumerate(own)}


def findings_of(index: RecordIndex) -> Findings:
    return find(record for _, record in index.find(Search(events=EVENTS)))


def usual(**more: float) -> Times:
    return Times(**{"script": 0.01, "load": 0.02, "compute": 0.5, "awaited": 0.0} | more)


@pytest.mark.parametrize("kind", ["script", "load", "compute", "update"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_takes_longer(kind: str, rank: int) -> None:
    own = [usual(**({kind: 0.8} if place == rank else {})) for place in range(4)]
    found = explain([step_of(own)] * STEPS, start=ALLREDUCE)
    first, length = found.culprits[0], usual(**{kind: 0.8}).own + 0.05
    assert (first.kind, first.rank) == (kind, rank)
    assert ("strategy=stealing" in [one.set for one in found.advice]) == (kind == "compute")
    assert first.share == pytest.approx((0.8 - getattr(usual(), kind)) / length, abs=1e-3)


def test_others_compute_while_a_rank_pauses_if_they_steal() -> None:
    step = step_of([usual(script=0.41, compute=0.1), usual(), usual(), usual()])
    (first, *_) = explain([step] * STEPS, start={"strategy": "stealing"}).culprits
    assert (first.kind, first.rank, first.share) == ("script", 0, pytest.approx(0.4 / 4 / (0.53 + 0.05), abs=1e-3))


def test_ranks_in_turn_share_the_blame() -> None:
    steps = [step_of([usual(compute=1.0 if rank == step % 2 else 0.5) for rank in range(3)]) for step in range(STEPS)]
    found = explain(steps).culprits
    assert {one.rank for one in found[:2]} == {0, 1} and found[0].share == pytest.approx(found[1].share)


@pytest.mark.parametrize(("stage", "said"), [(None, "workers"), (1, "workers (stage 1)")])
def test_many_ranks_in_turn_count_together(stage: int | None, said: str) -> None:
    """No one of them takes a share of the time that is worth a sentence."""
    slow = range(64) if stage is None else range(1, 64, 2)
    steps = [
        step_of([usual(compute=1.0 if rank == slow[step % len(slow)] else 0.5) for rank in range(64)])
        for step in range(64)
    ]
    found = explain(steps, {rank: {"stage": rank % 2} for rank in range(64)} if stage else None)
    (first, *rest) = found.culprits
    assert (first.kind, first.rank, first.stage) == ("compute", None, stage)
    assert first.share == pytest.approx(0.5 / 1.08, abs=1e-3)
    assert sentences(found)[0].startswith(f"{said} take longer to compute than the others, in turn: 46%")
    assert "compute" not in [one.kind for one in rest]


def test_what_all_wait_for() -> None:
    found = explain([step_of([usual()] * 3, exchange=0.42)] * STEPS, start=ALLREDUCE)
    assert (found.culprits[0].kind, found.culprits[0].rank, found.culprits[0].share) == ("exchange", None, 0.4421)
    assert (found.advice[0].set, found.advice[0].gain) == ("wire=bfloat16", pytest.approx(0.221, abs=1e-3))
    found = explain([step_of([usual(load=0.4)] * 3)] * STEPS)
    assert found.culprits[0].kind == "load" and found.advice[0].set == "workers_per_loader=2"
    first = explain([step_of([usual(update=0.4)] * 3)] * STEPS).culprits[0]
    assert (first.kind, first.rank, first.share) == ("update", None, pytest.approx(0.4 / 0.98, abs=1e-3))
    found = explain([step_of([usual(script=0.5)] * 3)] * STEPS, pauses={"checkpoint": 6.0, "evaluate": 4.0})
    length = 1.07 * STEPS
    assert {one.kind: one.share for one in found.culprits if one.rank is None} == {
        "checkpoint": pytest.approx(6.0 / length, abs=1e-3),
        "evaluate": pytest.approx(4.0 / length, abs=1e-3),
        "exchange": pytest.approx(0.05 / 1.07, abs=1e-3),
    }


def test_nothing_to_blame() -> None:
    found = explain([step_of([usual(load=0.0, script=0.0)] * 4, exchange=0.001)] * STEPS)
    assert not found.culprits and "compute nearly all of the time" in sentences(found)[0]
    assert explain([]).steps == 0
    assert explain([{0: usual(compute=1.0)}] * STEPS).culprits == [], "one worker, which waits for nobody"


def test_only_what_a_strategy_can_change_is_advised() -> None:
    steps = [step_of([usual(), usual(compute=2.0)], exchange=0.0)] * STEPS
    assert [one.set for one in explain(steps, start=ALLREDUCE).advice] == ["strategy=stealing"]
    assert explain(steps, start={"strategy": "pipeline"}).advice == []
    assert explain([step_of([usual(load=2.0)] * 2)] * STEPS, start={"strategy": "hogwild"}).advice == []
    assert explain(steps, start={**ALLREDUCE, "located": True}).advice == [], "no other worker has the samples"


@pytest.mark.parametrize(("microbatches", "compute"), [(3, 1.0), (9, 2 / 3), (900, 9 / 14), (None, 9 / 14)])
def test_the_gain_of_stealing_is_that_of_workers_with_their_speeds(microbatches: int | None, compute: float) -> None:
    steps = [step_of([usual(compute=1.5), usual(), usual()], exchange=0.0)] * STEPS
    (advice,) = explain(steps, start={**ALLREDUCE, "microbatches": microbatches}).advice
    assert (advice.set, advice.gain) == ("strategy=stealing", pytest.approx((1.5 - compute) / 1.53, abs=5e-3))
    turns = [step_of([usual(compute=1.5 if rank == step % 3 else 0.5) for rank in range(3)]) for step in range(STEPS)]
    assert explain(turns, start=ALLREDUCE).advice == [], "pauses, as of a garbage collection, cannot be stolen"
    paused = [step_of([usual(compute=0.7 if step % 3 else 3.0), usual(), usual()], 0.0) for step in range(STEPS)]
    assert explain(paused, start=ALLREDUCE).advice == [], "pauses take most of what rank 0 takes longer"


def test_as_many_loader_processes_as_hide_the_loading() -> None:
    (advice,) = explain([step_of([usual(load=2.3, compute=0.75)] * 3, exchange=0.0)] * MANY_STEPS).advice
    assert (advice.set, advice.gain) == ("workers_per_loader=4", pytest.approx(2.3 / 3.06, abs=5e-3))
    (advice,) = explain(
        [step_of([usual(load=1.0, compute=0.99)] * 3, exchange=0.0)] * STEPS, start={"workers_per_loader": 2}
    ).advice
    assert (advice.set, advice.gain) == ("workers_per_loader=4", pytest.approx(0.5, abs=1e-3))
    (advice,) = explain([step_of([usual(load=9.24, compute=0.75)] * 3, exchange=0.0)] * MANY_STEPS).advice
    assert (advice.set, advice.gain) == ("workers_per_loader=8", pytest.approx(1 - 9.24 / 8 / 10, abs=5e-3))


@pytest.mark.parametrize(
    ("microbatches", "servers", "gain"),
    [(3, 0, 0.05 - 0.002), (12, 0, 0.05 - 0.008), (8, 1, 0.05 - 0.008), (60, 0, None)],
)
def test_loader_processes_take_time_to_hand_over_microbatches(
    microbatches: int, servers: int, gain: float | None
) -> None:
    steps = [step_of([usual(load=0.05, compute=0.94)] * 3, exchange=0.0)] * MANY_STEPS
    advice = explain(steps, start={"microbatches": microbatches, "servers": servers}).advice
    assert [one.gain for one in advice] == ([] if gain is None else [pytest.approx(gain, abs=1e-3)])


def test_loader_processes_hide_no_more_costly_samples_than_they_load_ahead() -> None:
    def hidden(load: float) -> float:
        loads = [load if at % 40 < 8 else 0.0 for at in range(MANY_STEPS)]
        steps = [step_of([usual(load=load, compute=0.1)] * 2, exchange=0.0) for load in loads]
        (advice,) = explain(steps).advice
        assert advice.set == "workers_per_loader=2"
        return advice.gain * (0.11 + load * 8 / 40) / (load * 8 / 40)

    assert hidden(0.1) > 0.8 and 0.75 < hidden(0.4) < 0.85


def test_pauses_of_a_rank_are_not_its_script() -> None:
    steps = [step_of([usual(script=0.8), usual(script=0.2)], exchange=0.0)] * STEPS
    found = {(one.kind, one.rank): one.share for one in explain(steps, pauses={"evaluate": 10.0}).culprits}
    length = 1.32 * STEPS
    assert found["evaluate", None] == pytest.approx(0.2 * STEPS / length, abs=1e-3)
    assert found["evaluate", 0] == pytest.approx((10.0 - 0.2 * STEPS) / length, abs=1e-3)
    assert found["script", 0] == pytest.approx((0.8 * STEPS - 10.0) / length, abs=1e-3)
    (advice,) = explain(steps, pauses={"checkpoint": 10.0}, start=ALLREDUCE).advice
    assert (advice.set, advice.gain) == ("checkpoint.every=auto", pytest.approx(10.0 / length - 0.01, abs=1e-3))
    for event, rank, named in (("checkpoint", 0, None), ("weights", 0, None), ("checkpoint", 1, 1), ("predict", 0, 0)):
        found = explain([{rank: step[0], 1 - rank: step[1]} for step in steps], pauses={event: 10.0})
        shares = {one.rank: one.share for one in found.culprits if one.kind == event}
        common = 0.2 * STEPS / length
        expected = {None: common, named: 10.0 / length - common * (named is not None)}
        assert shares == pytest.approx(expected, abs=1e-3) and sentences(found)


@pytest.mark.parametrize(
    ("start", "advised"),
    [
        ({}, {"strategy=stealing", "workers_per_loader=2", "wire=bfloat16", "checkpoint.every=auto"}),
        ({"stream": True}, {"strategy=stealing", "wire=bfloat16", "checkpoint.every=auto"}),
        ({"accepts": ["wire=bfloat16"]}, {"workers_per_loader=2", "wire=bfloat16"}),
        ({"accepts": ["strategy=stealing"]}, {"workers_per_loader=2", "strategy=stealing"}),
        ({"accepts": []}, {"workers_per_loader=2"}),
        ({"checkpoint.every": "auto"}, {"strategy=stealing", "workers_per_loader=2", "wire=bfloat16"}),
        ({"strategy": "sharded"}, {"workers_per_loader=2", "checkpoint.every=auto"}),
        ({"latency": None}, {"strategy=stealing", "workers_per_loader=2", "checkpoint.every=auto"}),
        ({"latency": 0.2}, {"strategy=stealing", "workers_per_loader=2", "checkpoint.every=auto"}),
        ({"crowded": True}, {"strategy=stealing", "wire=bfloat16", "checkpoint.every=auto"}),
    ],
)
def test_only_settings_that_the_run_would_accept_and_gain_by_are_advised(
    start: dict[str, Any], advised: set[str]
) -> None:
    step = step_of([usual(load=0.4, script=0.2), usual(load=0.4, script=0.2, compute=1.0)], exchange=0.4)
    found = explain([step] * STEPS, pauses={"checkpoint": 0.2 * STEPS}, start=ALLREDUCE | start)
    assert {one.set for one in found.advice} == advised


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, set()),
        ({"exact": True}, set()),
        ({"exact": "fixed-point"}, {"wire=bfloat16"}),
        ({"wire": "int-auto"}, {"strategy=stealing"}),
        ({"wire": "topk"}, {"strategy=stealing", "checkpoint.every=auto"}),
        ({"communication": "auto"}, {"strategy=stealing"}),
        ({"strategy": "sharded"}, {"checkpoint.every=auto"}),
        ({"optimizer": torch.optim.LBFGS}, {"strategy=stealing"}),
        ({"model": nn.Embedding(4, 2, sparse=True)}, {"strategy=stealing", "wire=bfloat16"}),
    ],
)
def test_the_run_tells_which_settings_it_would_accept(given: dict[str, Any], refused: set[str]) -> None:
    made: dict[str, Any] = {"model": nn.Linear(2, 2), "optimizer": torch.optim.SGD} | given
    model, optimizer = made.pop("model"), made.pop("optimizer")
    context: Any = SimpleNamespace(
        settings=Settings.model_validate({"strategy": "allreduce", "batch": 8, "checkpoint": {"every": 5}} | made),
        order=SimpleNamespace(microbatches=8, batch=8, located=False),
        update=OptimizerStep(model, optimizer, None, None, Scaling()),
        world=SimpleNamespace(size=2),
    )
    components = Components(model, optimizer, None, nn.functional.mse_loss, None, None, None)
    assert {*ALLREDUCE["accepts"]} - {*_accepted(components, context, 2)} == refused  # type: ignore[misc]


def test_a_narrower_format_saves_no_latency() -> None:
    found = explain([step_of([usual()] * 3, exchange=0.42)] * STEPS, start={**ALLREDUCE, "latency": 0.1})
    assert found.advice[0] == Advice("wire=bfloat16", pytest.approx((0.4421 - 0.2 / 0.95) / 2, abs=1e-3))


@pytest.mark.parametrize("strategy", ["parameter-server", "sharded"])
def test_all_wait_for_an_update_after_all_have_computed(strategy: str) -> None:
    """Rank 0 serves the others: it updates for 0.3 s, after they have computed for 0.5 s."""
    server, worker = Times(0.0, 0.0, 0.0, 0.55, 0.3), Times(0.0, 0.0, 0.5, 0.35)
    found = explain([{0: server, 1: worker, 2: worker}] * STEPS, start={"strategy": strategy, "servers": 1})
    shares = {(one.kind, one.rank): one.share for one in found.culprits}
    assert shares == {
        ("update", 0): pytest.approx(0.3 / 0.85, abs=1e-3),
        ("exchange", None): pytest.approx(0.05 / 0.85, abs=1e-3),
    }


def test_replicas_that_are_slow_in_turn_lose_nothing_between_outer_steps() -> None:
    def records(slow: Callable[[int], int]) -> list[Record]:
        found: list[Record] = []
        for step, rank in ((step, rank) for step in range(30) for rank in range(3)):
            times = {"seconds": 1.0 if rank == slow(step) else 0.5, "waited": 0.0, "awaited": 0.0, "update": 0.0}
            times |= {"between": 0.0, "awaited_between": 0.0, "step": step}
            about = {"time": float(step), "rank": rank, "generation": 0}
            found.append({**about, "event": "step", **times})
            if step % 3 == 2:
                found.append({**about, "event": "outer-step", "step": step})
        return found

    assert find(records(lambda step: step % 3)).culprits == []
    found = find(records(lambda step: 2))
    assert [(one.kind, one.rank, one.share) for one in found.culprits] == [("compute", 2, 0.5)] and found.steps == 27


def test_too_few_cores_are_told() -> None:
    def records(delayed: float) -> list[Record]:
        times = {"waited": 0.5, "awaited": 0.1, "delayed": delayed, "between": 0.0, "awaited_between": 0.0}
        about = {"event": "step", "generation": 0, "seconds": 1.0, "update": 0.0, **times}
        return [{**about, "time": 1.0 + at, "rank": rank, "step": at} for at in range(STEPS) for rank in range(2)]

    few, enough = find(records(0.45)), find(records(0.05))
    assert [one.share for one in few.culprits] == pytest.approx([0.5 * 0.55, 0.1 * 0.55]), "loading and the exchange"
    assert few.delayed == 0.45 == few.data()["delayed"]
    assert few.advice == [], "loader processes would lack cores, too"
    assert enough.advice == [Advice("workers_per_loader=2", pytest.approx(0.5 * 0.95, abs=1e-2))]
    assert "had no core for 45% of" in "\n".join(sentences(few)) and "cores" not in "\n".join(sentences(enough))


def test_a_slow_rank_comes_before_what_all_take_longer_for_without_a_core() -> None:
    steps = [step_of([usual(load=0.25), usual(load=0.25, compute=0.7), usual(load=0.25)])] * STEPS
    assert [one.kind for one in explain(steps).culprits[:2]] == ["load", "compute"]
    assert [one.kind for one in explain(steps, start={"delayed": 0.5}).culprits[:2]] == ["compute", "load"]


def test_loader_processes_are_not_advised_if_the_data_change() -> None:
    found = explain([step_of([usual(load=0.4, script=0.5)] * 3)] * STEPS, pauses={"map": 8.0})
    assert {"load", "map"} <= {one.kind for one in found.culprits} and not found.advice


def test_a_run_without_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, 0, 1.0, event="start")
    with pytest.raises(SystemExit) as ended:
        main(["why", str(tmp_path)])
    assert ended.value.code == 2 and "has no complete step" in capsys.readouterr().err


def test_the_time_of_a_recovery_is_of_no_step(tmp_path: Path) -> None:
    times = {"seconds": 1.0, "waited": 0.0, "awaited": 0.0}
    for rank, ends in ((0, [1.0, 2.0, 33.0, 34.0, 65.0]), (1, [1.0, 2.0, 33.0, 34.0, 65.0])):
        for step, end in enumerate(ends):
            if step == 4:  # resumed
                write(tmp_path, rank, 0, 64.0, event="start")
            write(tmp_path, rank, step, end, **times | {"generation": int(step in (2, 3)), "loss": math.nan})
    index = RecordIndex(tmp_path)
    index.update()
    assert findings_of(index).culprits == []
    index.close()


@pytest.mark.parametrize("pause", ["checkpoint", "weights", "evaluate", "predict", "map", "extend"])
def test_waits_between_steps_and_clocks_that_jump(pause: str) -> None:
    """Rank 1 takes 0.9 s more, before even steps for a pause, in odd ones for its update. Rank 0 waits."""
    records: list[Record] = []
    for step, rank in ((step, rank) for step in range(STEPS) for rank in range(2)):
        odd, early = step % 2, rank == 0
        more = {"seconds": 1.0, "waited": 0.0, "between": 0.1 if odd else 1.0, "update": 0.9 * rank * odd}
        more |= {"awaited": 0.9 * early, "awaited_between": 0.9 * early * (1 - odd), "step": step}
        about = {"time": 2.0 * step + 40.0 * (step % 3), "rank": rank, "generation": 0}
        records.append({**about, "event": "step", **more})
        if not odd:
            records.append({**about, "event": pause, "seconds": 1.0, "stall": 1.0})
    found = find(records)
    lost = {(one.kind, one.rank): one.share * found.seconds for one in found.culprits if one.rank is not None}
    assert lost == {("update", 1): pytest.approx(8.1, abs=0.01), (pause, 1): pytest.approx(7.2, abs=0.01)}


def test_what_a_call_of_the_script_takes_is_of_the_script_and_no_format_saves_it() -> None:
    """Each rank spends 0.5 s between steps, in a collective call of the script for 0.4 s, rank 1 for 0.3 s."""
    records: list[Record] = [{"time": 0.0, "event": "start", "rank": 0, "generation": 0, **ALLREDUCE}]
    for step, rank in ((step, rank) for step in range(STEPS) for rank in range(2)):
        waits = {"awaited": 0.4 - 0.1 * rank, "awaited_between": 0.4 - 0.1 * rank}
        more = {"seconds": 0.5, "waited": 0.0, "between": 0.5, "update": 0.0, "step": step}
        records.append({"time": float(step), "event": "step", "rank": rank, "generation": 0, **waits, **more})
    found = find(records)
    assert {(one.kind, one.rank) for one in found.culprits} == {("script", None), ("script", 1)}
    assert not any(one.set.startswith("wire") for one in found.advice)


def write(run: Path, rank: int, step: int, end: float, **more: Any) -> None:
    record = {"time": end, "event": "step", "rank": rank, "generation": 0, "step": step, **more}
    (run / "events").mkdir(parents=True, exist_ok=True)
    with (run / "events" / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_the_records_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, (compute, clock) in enumerate([(0.2, 0.0), (0.5, 5000.0), (0.2, 0.0)]):
        write(tmp_path, rank, 0, clock, event="start", host=f"host-{rank}", **ALLREDUCE)
        write(tmp_path, rank, 0, clock, event="forward", stage=rank, seconds=0.1)
        for step in range(12):
            waits = {"waited": 0.0, "awaited": 0.55 - compute}
            write(tmp_path, rank, step, clock + 0.55 * (step + 1), seconds=0.55, **waits)
        write(tmp_path, rank, 12, clock, seconds=0.5)  # of a version without these fields
    with pytest.raises(SystemExit):
        main(["why", str(tmp_path), "--json"])
    known = json.loads(capsys.readouterr().out)
    assert known["culprits"][0] == {
        "kind": "compute",
        "share": pytest.approx(0.3 / 0.55, abs=1e-3),
        "rank": 1,
        "host": "host-1",
        "stage": 1,
        "layer": None,
        "sender": None,
        "receiver": None,
    }
    assert known["advice"][0] == {"set": "strategy=stealing", "gain": pytest.approx((0.5 - 0.25) / 0.55, abs=5e-3)}
    with pytest.raises(SystemExit):
        main(["why", str(tmp_path)])
    assert capsys.readouterr().out.startswith("rank 1 (stage 1) takes longer to compute than the others: 55% of the")


def ended(run: Path, steps: int, seconds: float = 0.55) -> Path:
    """Write the records of two ranks, of which rank 1 computes for longer."""
    for rank in range(2):
        write(run, rank, 0, 0.0, event="start", strategy="allreduce", host="a", workers=2)
        for step in range(steps):
            awaited = 0.3 * seconds if rank == 0 else 0.0
            write(run, rank, step, seconds * (step + 1), seconds=seconds, waited=0.0, awaited=awaited)
    return run


def test_the_last_line_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert last_line(ended(tmp_path / "short", 19)) == "" == last_line(ended(tmp_path / "quick", 40, 0.01))
    run = ended(tmp_path / "run", 60)
    said = (
        "rank 1 on a takes longer to compute than the others: 30% of the time, 165 ms of each step (more: paceline why)"
    )
    assert last_line(run) == said
    with (run / "events" / "rank-1.jsonl").open("ab") as file:
        file.write(b'\xff\n{"event": "step", "time": "x"}\n{"event": "step", "rank": 1, "step": 3}\n{"event": "ste')
    assert last_line(run) == said
    monkeypatch.setattr(at_end, "_HEAD_BYTES", 1 << 10)
    monkeypatch.setattr(at_end, "_END_BYTES", 1 << 12)
    assert last_line(run) == said and 20 <= find_at_end(run).steps < 40, "of the ends of the files"
    (run / "events" / "rank-1.jsonl").rename(run / "events" / "rank-1.old")
    assert last_line(run) == "", "the other rank is on another machine"
    (run / "events" / "rank-1.jsonl").mkdir()
    assert last_line(run) == ""
    assert last_line(tmp_path) == ""


def test_only_the_newest_launch_of_a_resumed_run_counts(tmp_path: Path) -> None:
    """The first launch had a third rank, and lasted longer than the second one of two ranks."""
    run = tmp_path
    for rank in range(3):
        for step in range(60):
            write(run, rank, step, step - 1000.0, seconds=1.0, waited=0.9, awaited=0.0)
    ended(run, 40)
    launcher = run / "events" / "launcher.jsonl"
    formed = {"event": "membership", "rank": "launcher", "generation": 0}
    lines = [{**formed, "time": -1001.0, "workers": [0, 1, 2]}, {**formed, "time": -1.0, "workers": [0, 1]}]
    launcher.write_text("".join(json.dumps(one) + "\n" for one in lines[:1]))
    assert find_at_end(run).steps >= 50, "it is one launch"
    launcher.write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert last_line(run).startswith("rank 1 on a takes longer to compute than the others: 30%")
    (run / "events" / "rank-1.jsonl").unlink()
    assert last_line(run) == "", "a rank of the newest launch is missing"


def test_layers_of_the_stage_are_named() -> None:
    records: list[Record] = [
        {"time": 0.0, "event": "cut", "rank": 0, "generation": 0, "stages": [["a", "b", "c\x1b[2J"], ["d"]]},
        *(
            {"time": 1.0 + at, "event": "step", "rank": rank, "generation": 0, "step": at, "seconds": 1.0, **waits}
            for at in range(STEPS)
            for rank, waits in enumerate(({"waited": 0.0, "awaited": 0.1}, {"waited": 0.0, "awaited": 0.6}))
        ),
    ]
    found = find(records, {0: 0, 1: 1})
    assert (found.culprits[0].rank, found.culprits[0].layer) == (0, "a to c\x1b[2J")
    assert sentences(found)[0].startswith("rank 0 (stage 0: a to c\\x1b[2J) takes longer to compute")
    assert find(records, {0: 1, 1: 0}).culprits[0].layer == "d"
    assert find(records, {0: 7, 1: 0}).culprits[0].layer is None
    assert find([{**records[0], "stages": [[], 3]}, *records[1:]], {0: 0}).culprits[0].layer is None


def test_waits_are_summed_for_each_rank() -> None:
    waiting, now = Waiting(Membership(0, 3), 10.0), [0.0]
    waiting.clock = lambda: now[0]
    for ranks, seconds in (([1, 2], 1.0), ([2], 2.0), ([], 5.0), ([1], 0.5), ([], 1.0)):
        waiting.waits_for(ranks)
        if ranks == [2]:
            assert waiting.awaited.since == 0.0, "it has been awaited since the wait began"
        now[0] += seconds
    assert waiting.take_waits() == (3.5, 0.0, 2, [])
    assert waiting.take_waits() == (0.0, 0.0, None, [])
    for rank, seconds in ((2, 3.0), (1, 1.0), (2, 2.0)):
        if rank == 1:
            waiting.begin_step()
        with waiting.receiving() if rank == 1 else nullcontext():
            waiting.waits_for([rank])
            now[0] += seconds
            waiting.waits_for([])
    assert waiting.take_waits() == (6.0, 3.0, 2, [(1, 1.0)]), (
        "only some waits are for links, and some are between steps"
    )
    waiting.add_wait(2.0)
    waiting.begin_step()
    assert waiting.take_waits() == (2.0, 2.0, None, []), "in a call of the script"


SENDS, RECEIVES = {(1, 0): 0.4, (1, 2): 0.4}, {(0, 1): 0.4, (2, 1): 0.4}
ALIKE = {(sender, receiver): 0.2 for sender in range(3) for receiver in range(3) if sender != receiver}
NONE = None, None, None


@pytest.mark.parametrize(
    ("links", "ends", "said"),
    [
        (SENDS, (1, 1, None), "rank 1 on host-1 sends slowly to the others"),
        ({**SENDS, (0, 1): 0.1, (2, 0): 0.1}, (1, 1, None), "rank 1 on host-1 sends slowly to the others"),
        ({(1, 0): 0.15, (1, 2): 0.15}, (1, 1, None), "rank 1 on host-1 sends slowly to the others"),
        ({(1, 0): 0.1, (1, 2): 0.1}, NONE, "all workers wait for the exchange of data"),
        (RECEIVES, (1, None, 1), "rank 1 on host-1 receives slowly from the others"),
        ({**RECEIVES, (1, 0): 0.3, (1, 2): 0.2}, (1, None, None), "rank 1 on host-1 sends and receives slowly"),
        ({(2, 0): 0.01, (0, 1): 0.01, (1, 2): 0.4}, (1, 1, 2), "rank 1 on host-1 sends slowly to rank 2"),
        ({(0, 1): 0.01, (0, 2): 0.4}, (2, 0, 2), "rank 2 on host-2 receives slowly from rank 0"),
        ({(1, 0): 0.4, (0, 1): 0.4}, NONE, "all workers wait for the exchange of data"),
        ({(1, 0): 0.4, (2, 1): 0.4, (0, 2): 0.4}, NONE, "all workers wait for the exchange of data"),
        (ALIKE, NONE, "all workers wait for the exchange of data"),
        ({}, NONE, "all workers wait for the exchange of data"),
    ],
)
def test_the_end_of_a_link_that_is_slow(
    links: dict[tuple[int, int], float], ends: tuple[int | None, ...], said: str
) -> None:
    records: list[Record] = []
    for rank in range(3):
        records.append({"time": 0.0, "event": "start", "rank": rank, "generation": 0, "host": f"host-{rank}"})
        waits = [[sender, seconds] for (sender, receiver), seconds in links.items() if receiver == rank]
        for step in range(STEPS):
            times = {"seconds": 1.0, "waited": 0.0, "awaited": 0.5, "step": step, "event": "step", "links": waits}
            records.append({"time": step + 1.0, "rank": rank, "generation": 0, **times})
    found = find(records)
    first = found.culprits[0]
    assert (first.kind, first.rank, first.sender, first.receiver) == ("exchange", *ends)
    assert sentences(found)[0] == f"{said}: 50% of the time, 500 ms of each step"


@pytest.mark.parametrize("old", [False, True])
def test_a_slow_link_is_named_after_a_change_of_membership(old: bool) -> None:
    """The sender is rank 1 of the first 5 steps. It becomes rank 0 when rank 0 is lost. Old records have one link."""
    records: list[Record] = []
    for generation, steps, slow, ranks in ((0, range(5), 1, range(4)), (1, range(5, 30), 0, range(3))):
        for step in steps:
            for rank in ranks:
                link = [ranks[rank - 1], 0.01] if rank == slow else [slow, 0.4]
                waits = {
                    "seconds": 1.0,
                    "waited": 0.0,
                    "awaited": 0.5,
                    **({"link": link} if old else {"links": [link]}),
                }
                record = {"time": step + 1.0, "event": "step", "rank": rank, "generation": generation, "step": step}
                records.append(record | waits)
    first = find(records).culprits[0]
    assert (first.kind, first.rank, first.sender, first.receiver) == ("exchange", 0, 0, None)


def test_a_late_sender_is_no_slow_link() -> None:
    records: list[Record] = []
    for rank, awaited in enumerate([0.7, 0.3, 0.7]):  # rank 1 computes for 0.4 s more
        for step in range(STEPS):
            wait = {
                "seconds": 1.0,
                "waited": 0.0,
                "awaited": awaited,
                "links": [[0 if rank == 1 else 1, awaited - 0.3]],
            }
            record = {"time": step + 1.0, "event": "step", "rank": rank, "generation": 0, "step": step}
            records.append(record | wait)
    assert [(one.kind, one.rank) for one in find(records).culprits] == [("compute", 1), ("exchange", None)]


def test_a_replica_that_is_late_at_an_outer_step_has_no_slow_link() -> None:
    """Rank 1 computes for 0.4 s more in each step. The others wait for it, and all for 0.3 s, in every fourth step."""
    records: list[Record] = []
    for step, rank in ((step, rank) for step in range(40) for rank in range(3)):
        own, late, outer = (0.9, 0.0, step % 4 == 3) if rank == 1 else (0.5, 1.6, step % 4 == 3)
        awaited = outer * (late + 0.3)
        times = {"seconds": own + awaited, "waited": 0.0, "awaited": awaited, "between": 0.0, "awaited_between": 0.0}
        about = {"time": float(step), "rank": rank, "generation": 0, "step": step}
        link = {"links": [[0 if rank == 1 else 1, late]]} if outer else {}
        records.append({**about, "event": "step", "update": 0.0, **times, **link})
        records += [{**about, "event": "outer-step"}] if outer else []
    assert [(one.kind, one.rank) for one in find(records).culprits] == [("compute", 1), ("exchange", None)]


def test_a_pipeline_that_fills_is_no_exchange() -> None:
    about = {rank: {"stage": rank // 2} for rank in range(4)}
    step = step_of([usual(script=0.0, load=0.0, compute=0.4 if rank < 2 else 0.8) for rank in range(4)], exchange=0.15)
    found = explain([step] * STEPS, about, start={"strategy": "pipeline", "microbatches": 4})
    shares = {(one.kind, one.stage): one.share for one in found.culprits}
    assert shares["exchange", None] == pytest.approx(0.05 / 0.95, abs=1e-3), "0.1 s for a microbatch of the first stage"
    assert (found.culprits[0].kind, found.culprits[0].stage) == ("compute", 1)


def test_ranks_that_are_slow_in_turn_come_before_a_larger_share() -> None:
    own = [[usual(load=0.2, compute=0.8 if rank == step % 3 else 0.5) for rank in range(3)] for step in range(STEPS)]
    found = explain([step_of(one, exchange=0.0) for one in own])
    assert [one.kind for one in found.culprits] == ["compute"] * 3 + ["load"]
    assert max(one.share for one in found.culprits) == found.culprits[-1].share


def test_a_slow_start_is_of_a_rank_or_of_all() -> None:
    steps = [step_of([usual()] * 3)] * STEPS
    late = step_of([usual(), usual(), usual(compute=4.0)])
    first = explain(steps, first=[late, *steps[:2]]).culprits[0]
    assert (first.kind, first.rank, first.share) == ("start", 2, pytest.approx(2.5 / (0.58 * STEPS + 2.5), abs=1e-3))
    assert "start" not in {one.kind for one in explain(steps, first=[step_of([usual(compute=1.4)] * 3)]).culprits}
    found = explain(steps, first=[step_of([usual(compute=9.5)] * 3)])
    first, lost = found.culprits[0], 9.5 - 0.5 - 1.0  # less the second for probes
    assert (first.kind, first.rank, first.share) == ("start", None, pytest.approx(lost / found.seconds, abs=1e-3))
    assert sentences(found)[0].endswith(f"{lost:.3g} s")


@pytest.mark.parametrize("late", ["before paceline.start", "before the first step"])
def test_a_rank_that_comes_late_is_named(late: str) -> None:
    """Rank 2 of a run that is resumed after 10 steps takes 5 s more before the run, or before its first step."""
    records: list[Record] = []
    for rank, launch in ((rank, launch) for rank in range(3) for launch in range(2)):
        about = {"rank": rank, "generation": 0}
        early = 5.0 * (rank < 2 and launch == 0)
        met = early if late == "before paceline.start" else 0.0
        records.append({**about, "time": 100.0 * launch, "event": "gathered", "seconds": met})
        records.append({**about, "time": 100.0 * launch, "event": "start"})
        for step in range(10 * launch, 10 * launch + 10):
            awaited = 0.1 + (early - met) * (step == 0)
            times = {"seconds": 0.4 + awaited, "waited": 0.0, "awaited": awaited, "step": step}
            records.append({**about, "event": "step", "time": 100.0 * launch + step * 0.5, **times})
    first = find(records).culprits[0]
    assert (first.kind, first.rank) == ("start", 2)
    assert first.share == pytest.approx(4.0 / (4.0 + 17 * 0.5), abs=1e-3), "less the second that probes may take"


SCRIPT = """
import os, time
from functools import partial
import torch
import paceline
from subjects import tell

kind, rank = os.environ["KIND"], int(os.environ["RANK"])

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, place):
        if kind == "load" and rank == 1:
            time.sleep(0.05)
        return torch.ones(2), torch.zeros(1)

class Model(torch.nn.Linear):
    def forward(self, value):
        time.sleep(0.2 if kind == "compute" and rank == 1 else 0.0)
        return super().forward(value)

session = paceline.start(
    model=Model(2, 1), optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.mse_loss, data=Data(),
    batch=12, microbatches=3, audit="off", timeout_seconds=60,
)
for batch in session.batches(steps=12):
    session.step(batch)
    time.sleep(0.2 if kind in ("script", "collective") and rank == 1 else 0.0)
    if kind == "collective":
        torch.distributed.all_reduce(torch.ones(1))
tell(rank=session.rank)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compute", "load", "script", "collective"])
def test_a_worker_that_is_slow_is_named(printed: Printed, tmp_path: Path, kind: str) -> None:
    printed(SCRIPT, 3, tmp_path, environment={"KIND": kind, "PACELINE_RUN": str(tmp_path)})
    index = RecordIndex(tmp_path)
    index.update()
    first = findings_of(index).culprits[0]
    index.close()
    assert (first.kind, first.rank) == ("script" if kind == "collective" else kind, 1)
