"""Comparison in words and numbers, for the terminal and the page."""

from __future__ import annotations

from paceline.observe.timeline.comparison import Comparison

Rows = list[tuple[str, ...]]  # Table rows. The first row names the columns.


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with two decimals.

    >>> milliseconds(1.23456)
    '1,234.56'
    """
    return f"{1000 * seconds:,.2f}"


def headline(comparison: Comparison) -> str:
    """Name the step and the run."""
    pipeline = comparison.pipeline
    parts = [
        pipeline.settings.schedule,
        f"{pipeline.workers} workers",
        f"{len(pipeline.stages)} stages",
        f"{pipeline.microbatches} microbatches",
    ]
    if pipeline.generation:
        parts.append(f"generation {pipeline.generation}")
    return f"Step {comparison.step} of {comparison.run.resolve().name}: {', '.join(parts)}"


def totals(comparison: Comparison) -> Rows:
    """Return the duration and bubble of the whole step, predicted and measured."""
    rows: Rows = [("", "ms", "bubble")]
    for name, timeline in (("predicted", comparison.predicted), ("measured", comparison.measured)):
        rows.append((name, milliseconds(timeline.seconds), f"{timeline.bubble:.1%}"))
    return rows


def workers(comparison: Comparison) -> Rows:
    """Return for each worker the share of the step that it computes, and the workers that it waits for."""
    rows: Rows = [
        ("rank", "stages", "utilisation", "predicted", "busy ms", "predicted", "idle ms", "kept", "waits for")
    ]
    predicted, measured = comparison.predicted, comparison.measured
    for rank, waits in enumerate(comparison.waits):
        longest = sorted(waits.items(), key=lambda pair: -pair[1])
        rows.append(
            (
                str(rank),
                ", ".join(map(str, comparison.stages_of(rank))),
                f"{1 - measured.bubbles[rank]:.1%}",
                f"{1 - predicted.bubbles[rank]:.1%}",
                milliseconds(measured.busy[rank]),
                milliseconds(predicted.busy[rank]),
                milliseconds(comparison.idle[rank]),
                str(comparison.activations[rank]),
                ", ".join(f"rank {other}: {milliseconds(seconds)} ms" for other, seconds in longest) or "nobody",
            )
        )
    return rows


def stages(comparison: Comparison) -> Rows:
    """Return the layers of each stage, and its durations per microbatch."""
    rows: Rows = [("stage", "forward ms", "predicted", "backward ms", "predicted", "layers")]
    medians, times = comparison.median_times, comparison.times
    for stage, layers in enumerate(comparison.pipeline.stages):
        rows.append(
            (
                str(stage),
                milliseconds(medians.forward[stage]),
                milliseconds(times.forward[stage]),
                milliseconds(medians.input[stage] + medians.weight[stage]),
                milliseconds(times.input[stage] + times.weight[stage]),
                layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}",
            )
        )
    return rows


def waiting(comparison: Comparison) -> str:
    """Describe which worker waited most, and for which worker."""
    totals = [sum(waits.values()) for waits in comparison.waits]
    rank = max(range(len(totals)), key=lambda one: totals[one])
    waits = comparison.waits[rank]
    if not totals[rank]:
        return "No worker waited for another."
    other = max(waits, key=lambda one: waits[one])
    part = f", of these {milliseconds(waits[other])} ms" if len(waits) > 1 else ""
    return (
        f"Rank {rank} waited most: {milliseconds(totals[rank])} ms{part} for rank {other}, to receive from it and to "
        f"send to it. It was idle {milliseconds(comparison.idle[rank])} ms more."
    )


def clocks(comparison: Comparison) -> str:
    """Return a note if durations are those of kernel launches, otherwise ""."""
    if not comparison.launches:
        return ""
    return (
        "The workers computed on GPUs: the boxes are the times of launches, not of the kernels that run after them. "
        "The time of the kernels shows where a worker had to wait for its GPU."
    )


def duration(comparison: Comparison) -> str:
    """Describe the step's duration including what is not drawn. Empty without a flush, where it is unknown."""
    if comparison.pipeline.asynchronous:
        return ""
    seconds = comparison.pipeline.steps[comparison.step]
    return f"With data loading, reductions and the update the step took {milliseconds(seconds)} ms."
