"""Published tables of other systems beside what the simulator predicts for their schedules, models and machines.

Each input file (TOML) beside this one names its source, and where each constant comes from. None is fitted to the table
that it is checked on. The programs and schedules are those with which ``paceline plan`` predicts a step.

    python bench/plan/published                        # writes the tables of docs/plan-published.md
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.planning.costs import Work
from paceline.planning.programs import pipeline
from paceline.planning.simulate import Compute, Machine, Place, Program, Simulation, Wait
from paceline.schedule.balance import LayerCost
from paceline.schedule.pipeline.choice import synchronous_schedule
from paceline.schedule.pipeline.operations import Kind, Operation, Schedule
from paceline.settings import PipelineSettings

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parents[2] / "docs/plan-published.md"
BEGIN, END = "<!-- begin: python bench/plan/published -->\n", "<!-- end -->\n"
INPUTS = "amoebanet", "resnet-101", "gpt-530b", "gpt-175b", "gpt-1t"


def layers_of(given: dict[str, Any], row: dict[str, Any], rate: float) -> list[LayerCost]:
    """Return the costs of the layers for a microbatch of a row."""
    if "transformer" in given:
        return transformer(**given["transformer"], rate=rate)
    samples = row["batch"] / row["microbatches"]
    found = []
    for name, *numbers, returned in given["layers"]:
        seconds = [
            samples * (1e9 * flop / given["flops"] + 1e6 * nbytes / given["memory_bytes_per_second"])
            for flop, nbytes in zip(numbers[::2], numbers[1::2], strict=True)
        ]
        found.append(LayerCost(name, *seconds, int(1e6 * samples * returned), 0, 0))
    return found


def transformer(layers: int, hidden: int, sequence: int, vocabulary: int, rate: float) -> list[LayerCost]:
    """Return the costs of layers that recompute, and of the output layer, for a sequence (arXiv 2104.04473, appendix).

    A backward pass takes twice as long as a forward pass. Gradients have 16 bits.
    """
    forward = (24 * sequence * hidden**2 + 4 * sequence**2 * hidden) / rate
    output = 2 * sequence * hidden * vocabulary / rate
    one = LayerCost("layer", forward, 3 * forward, 2 * sequence * hidden, 24 * hidden**2, 0)
    return [one] * layers + [LayerCost("output", output, 2 * output, 0, 2 * vocabulary * hidden, 0)]


def flop(layers: int, hidden: int, sequence: int, vocabulary: int) -> float:
    """Return the floating-point operations of a sequence, recomputation included (arXiv 2104.04473, equation 3)."""
    ratio = 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return 96 * sequence * layers * hidden**2 * ratio


def seconds(given: dict[str, Any], row: dict[str, Any], rate: float = 1.0) -> float:
    """Return the simulated seconds of a row's step."""
    layers, count, stages = layers_of(given, row, rate), row["microbatches"], row["stages"]
    if isinstance(stages, list):
        workers, sizes = len(stages), stages
    else:
        workers, of_worker = stages, row.get("chunks", 1)
        sizes = [given["transformer"]["layers"] // (workers * of_worker)] * workers * of_worker
        sizes[-1] += 1  # the output layer
    bounds = list(pairwise((0, *accumulate(sizes))))
    settings = PipelineSettings(schedule=row["schedule"], stages=len(sizes), chunks=row.get("chunks", 2))
    schedule = one_of_several(synchronous_schedule(settings, workers, count))
    place = Place(
        (Machine(bytes_per_second=given["bytes_per_second"]),) * workers,
        tuple(range(workers)) * row.get("pipelines", 1),
        tuple(range(workers)),
    )
    early = [0.0] * workers
    if given["recomputes"] == "early":
        early = [sum(layer.forward for layer in layers[slice(*bound)]) for bound in bounds]
        for at in range(bounds[-1][0], len(layers)):  # the last stage has the gradient at once
            again = layers[at].forward * (count - row["kept"]) / count
            layers[at] = replace(layers[at], backward=layers[at].backward + again)
    work = Work({1: tuple(layers)}, count, message_seconds=0.0)
    programs = {
        rank: recomputing(pipeline(work, place, rank, 0, schedule, bounds), early[rank], count - row.get("kept", 0))
        for rank in range(workers)
    }
    return Simulation(place.machines, place.of_worker).run(programs).seconds


def one_of_several(schedule: Schedule) -> Schedule:
    """Return a pipeline's schedule that reduces gradients before each update, as several equal pipelines do."""
    workers = tuple(
        tuple(
            step
            for one in operations
            for step in ((Operation(Kind.REDUCE, one.stage), one) if one.kind is Kind.UPDATE else (one,))
        )
        for operations in schedule.workers
    )
    return replace(schedule, workers=workers)


def recomputing(program: Program, again: float, until: int) -> Program:
    """Recompute the forward passes of microbatches before this number before their gradients arrive."""
    for step in program:
        if isinstance(step, Wait) and again and step.key[0] == "activations":
            _, _, sender, stage, microbatch = step.key
            if sender > stage and microbatch < until:
                yield Compute(again)
        yield step


def predicted(given: dict[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield each row with the value that the simulator predicts for it."""
    rate = base = 1.0
    if "calibration" in given:
        row = given["calibration"]
        rate = 200e12 * given["gpus"]
        rate *= seconds(given, row, rate) / published_seconds(given, row)  # nearly all of the time is computing
    for row in given["rows"]:
        took = seconds(given, row, rate)
        if row.get("unit") == "s":
            yield row, took
        elif "transformer" in given:
            yield row, rate_of(given, row, took)
        elif row["name"] == given["base"]:
            base = row["batch"] / took
        else:
            yield row, row["batch"] / took / base


def rate_of(given: dict[str, Any], row: dict[str, Any], took: float) -> float:
    """Return the TFLOP/s of a GPU, from the seconds of a step, or these from the TFLOP/s."""
    return row["microbatches"] * flop(**given["transformer"]) / (row["stages"] * given["gpus"]) / took / 1e12


def published_seconds(given: dict[str, Any], row: dict[str, Any]) -> float:
    """Return the published seconds of a step."""
    value: float = row["published"]
    return value if row["unit"] == "s" else rate_of(given, row, 1e12 * value) * 1e12


def table(name: str) -> tuple[list[str], list[float]]:
    """Return the table of an input file as lines of Markdown, and the errors."""
    given = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    lines = [f"### {given['name']}", "", "| run | | published | predicted | error |", "|---|---|---|---|---|"]
    errors = []
    for row, value in predicted(given):
        errors.append(value / row["published"] - 1)
        unit = row.get("unit", given.get("unit"))
        lines.append(f"| {row['name']} | {unit} | {row['published']:g} | {value:.4g} | {errors[-1]:+.1%} |")
    return [*lines, ""], errors


def written(names: Sequence[str] = INPUTS) -> str:
    """Return the tables of these inputs, with the mean of the errors without their signs."""
    found = [table(name) for name in names]
    errors = [abs(error) for _, errors in found for error in errors]
    mean = f"Mean error of {len(errors)} rows: {fmean(errors):.1%}; the largest is {max(errors):.1%}."
    return "\n".join(line for lines, _ in found for line in lines) + f"\n{mean}\n"


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + written() + END + rest.split(END)[1])
    print(f"written to {PAGE}")
