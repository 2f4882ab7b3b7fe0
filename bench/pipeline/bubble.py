"""The time of a step, and what the schedule predicts.

Layers sleep: the forward pass and both halves of the split backward pass equally long. The prediction takes for an
operation its time alone, measured in the same processes right before each session, and nothing for transfers,
reductions, updates and everything else.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from launched import run, span_of
from sleeping import FORWARD, INPUT, WEIGHT, sleepers, targets

import paceline
from paceline.schedule.pipeline.choice import synchronous_schedule
from paceline.schedule.pipeline.clock import Span, Timeline, Times, simulate
from paceline.schedule.pipeline.drawing import draw
from paceline.schedule.pipeline.operations import Kind
from paceline.settings import PipelineSettings
from paceline.strategies.pipeline.split_backward import backward_input, backward_weight

LAYERS, MICROBATCHES, SAMPLES = 8, 8, 4
SPLIT = ("zb-h1", "zb-v")
REPEATS = 5
WARM = 2
"""Steps of each session that are not counted."""


def work(given: dict[str, Any]) -> list[dict[str, Any]]:
    """One session for each schedule, in several rounds."""
    return [
        session(given, schedule)
        for turn in range(given["rounds"])
        for schedule in given["schedules"][turn:] + given["schedules"][:turn]
    ]


def session(given: dict[str, Any], schedule: str) -> dict[str, Any]:
    """The times of the steps of a session, and of the sleeps in them."""
    torch.manual_seed(0)
    width = given["width"]
    seconds = alone(given, schedule)
    training = paceline.start(
        model=sleepers([given["base"]] * LAYERS, width),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        loss=torch.nn.functional.mse_loss,
        data=targets(MICROBATCHES * SAMPLES, width),
        batch=MICROBATCHES * SAMPLES,
        microbatches=MICROBATCHES,
        strategy="pipeline",
        pipeline={"schedule": schedule, "cut": _cut(schedule, given["workers"])},
        threads=1,
        timeout_seconds=120,
    )
    ends: list[float] = []
    used = 0.0
    for batch in training.batches(steps=WARM + given["steps"]):
        if batch.step == WARM:
            used = time.process_time()
        training.step(batch)
        ends.append(time.monotonic())
    return {
        "schedule": schedule,
        "ends": ends,
        "alone": seconds,
        "processor": (time.process_time() - used) / given["steps"],
    }


def alone(given: dict[str, Any], schedule: str) -> dict[str, float]:
    """The times of the operations of one stage, measured alone."""
    layers = LAYERS // _stages(schedule, given["workers"])
    stage = sleepers([given["base"]] * layers, given["width"])
    weights = list(stage.parameters())
    seconds: dict[str, list[float]] = {FORWARD: [], INPUT: [], WEIGHT: []}
    for _ in range(REPEATS + 1):
        entered = torch.randn(SAMPLES, given["width"], requires_grad=True)
        moments = [time.perf_counter()]
        left = stage(entered)
        moments.append(time.perf_counter())
        if schedule in SPLIT:
            split = backward_input([left], [torch.ones_like(left)], [entered], weights)
            moments.append(time.perf_counter())
            backward_weight(weights, split)
            moments.append(time.perf_counter())
        else:
            left.backward(torch.ones_like(left))
            end = time.perf_counter()
            moments += [(moments[1] + end) / 2, end]
        for what, begin, end in zip(seconds, moments, moments[1:], strict=False):
            seconds[what].append(end - begin)
        stage.zero_grad()
    return {what: fmean(values[1:]) for what, values in seconds.items()}


def _stages(schedule: str, workers: int) -> int:
    return workers * (2 if schedule in ("interleaved", "zb-v") else 1)


def _cut(schedule: str, workers: int) -> tuple[str, ...]:
    """Stages of equally many layers."""
    stages = _stages(schedule, workers)
    return tuple(str(LAYERS // stages * place) for place in range(1, stages))


def predicted(schedule: str, workers: int, seconds: dict[str, float]) -> Timeline:
    """The timeline on the simulated clock; ``seconds`` are those of a stage.

    The first stage needs no input gradient, so the second half of its backward pass does all of it.
    """
    plan = synchronous_schedule(PipelineSettings(schedule=schedule), workers, MICROBATCHES)  # type: ignore[arg-type]
    forward, of_input, of_weight = (seconds[what] for what in (FORWARD, INPUT, WEIGHT))
    rest, nothing = plan.stages - 1, (0.0,) * plan.stages
    times = Times(
        forward=(forward,) * plan.stages,
        input=(0.0, *(of_input,) * rest),
        weight=(of_input + of_weight, *(of_weight,) * rest),
        transfer=nothing[1:],
        reduce=nothing,
        update=nothing,
    )
    return simulate(plan, times)


def measure(folder: Path, options: Namespace) -> dict[str, Any]:
    """Print the table and a drawing, and return the numbers."""
    given = {
        "schedules": options.schedules,
        "workers": options.workers,
        "base": options.base,
        "steps": options.steps,
        "rounds": options.rounds,
        "width": 4096,
    }
    done = run(folder, "bubble", options.workers, given)
    print(
        f"\n{options.workers} workers, {MICROBATCHES} microbatches, {LAYERS} layers asleep for {1e3 * options.base:g} "
        f"ms three times each; {options.rounds} rounds of {options.steps} steps\n"
        f"{'':12} {'predicted ms':>12} {'measured ms':>12} {'ratio':>7} {'bubble':>8} {'predicted':>10} "
        f"{'processor ms':>13}"
    )
    results: dict[str, Any] = {}
    for schedule in options.schedules:
        places = [place for place, one in enumerate(done.results[0]) if one["schedule"] == schedule]
        seconds, ratios, bubbles = [], [], []
        for place in places:
            workers = [one[place] for one in done.results]
            seconds_each = {what: fmean(one["alone"][what] for one in workers) for what in (FORWARD, INPUT, WEIGHT)}
            timeline = predicted(schedule, options.workers, seconds_each)
            ends = [max(moments) for moments in zip(*(one["ends"] for one in workers), strict=True)]
            taken = [after - before for before, after in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]
            seconds += taken
            ratios += [one / timeline.seconds for one in taken]
            bubbles += [1 - fmean(timeline.busy) / one for one in taken]
        results[schedule] = {
            "seconds": median(seconds),
            "ratio": median(ratios),
            "bubble": median(bubbles),
            "predicted": timeline.bubble,
        }
        print(
            f"{schedule:12} {1e3 * timeline.seconds:12.1f} {1e3 * median(seconds):12.1f} {median(ratios):7.3f} "
            f"{median(bubbles):8.1%} {timeline.bubble:10.1%} "
            f"{1e3 * sum(one[places[0]]['processor'] for one in done.results):13.1f}"
        )
        results[schedule]["drawing"] = _drawn(done, options, places[-1], timeline)
    for schedule in options.draw:
        print(f"\n{schedule}, predicted above measured\n{results[schedule]['drawing']}")
    return results


def _drawn(done: Any, options: Namespace, place: int, timeline: Timeline) -> str:
    """The last step of a session below its prediction, to the same scale."""
    cuts = [one["time"] for one in done.events if one["event"] == "cut"]
    begin, end = cuts[place], [*cuts, math.inf][place + 1]
    events = [one for one in done.events if one.get("step") == WARM + options.steps - 1 and begin <= one["time"] < end]
    workers = [
        [span for one in events if one["rank"] == rank and (span := span_of(one))] for rank in range(options.workers)
    ]
    first = min(span.begin for spans in workers for span in spans if span.operation.kind is Kind.FORWARD)
    moved = ([Span(one, max(0.0, left - first), right - first) for one, left, right in spans] for spans in workers)
    step = Timeline(tuple(map(tuple, moved)))
    column = min(end - begin for spans in timeline.workers for one, begin, end in spans if one.kind is Kind.FORWARD)
    return f"{draw(timeline, column)}\n\n{draw(step, column)}"
