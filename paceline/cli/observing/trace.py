"""``paceline trace``: write a trace of a run for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.observing.logs import Collect, Run, RunsDir, Step, steps_of, up_to_date
from paceline.errors import ConfigError, InputError

CONTEXT: dict[str, object] = {}
MORE_HELP = """ Open the file at https://ui.perfetto.dev; it stays in the browser.

Each worker has tracks of its steps, operations and exchanges, and counters such as the loss.

Exit code: 2 if there is no such run or step, paceline[trace] or paceline[otel] is missing, or the collector fails.
"""


def command(
    run: Run = None,
    step: Step = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Where to write the trace.", metavar="FILE", show_default="trace.pftrace of the run"),
    ] = None,
    otel: Annotated[
        str | None, typer.Option(help="Send spans and metrics to this OpenTelemetry collector instead.", metavar="URL")
    ] = None,
    collect: Collect = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write a trace of a run for Perfetto."""
    from paceline.observe.index import Search
    from paceline.observe.tracing import otel as open_telemetry
    from paceline.observe.tracing.clocks import described
    from paceline.observe.tracing.kernels import profiled_slices
    from paceline.observe.tracing.perfetto import write
    from paceline.observe.tracing.slices import workers_of

    if otel is not None and output is not None:
        raise ConfigError("--output has no effect with --otel, which writes no file; leave one of them out.")
    search = Search(steps=None if step is None else steps_of(step))
    with up_to_date(runs_dir, run, collect) as (folder, index):
        records = [record for _, record in index.find(search)]
        profiles = () if otel is not None else [one for one in records if one["event"] == "profile"]
        workers = workers_of(records, profiled_slices([folder, *(collect or ())], profiles))
        clocks = index.clocks.all()
    if not workers:
        raise InputError(f"{folder} has no records{'' if step is None else f' of the steps {step}'}.")
    path = output or folder / "trace.pftrace"
    if otel is not None:
        spans, points = open_telemetry.send(workers, folder, otel)
    else:
        write(workers, path, links=output is not None)
    slices = [one for worker in workers.values() for track in worker.tracks.values() for one in track]
    print(f"{len(slices)} slices of {', '.join(workers)}")
    for (_, machine), clock in clocks.items():
        if clock.differs:
            print(f"clock of machine {machine}: {described(clock)}")
    if moved := [one.values["moved"] for one in slices if one.receives is not None and "moved" in one.values]:
        print(
            f"{len(moved)} receives end up to {1e6 * max(moved):.0f} us later than their clocks say, after their sends"
        )
    if otel is not None:
        print(f"Sent to {otel}: {spans} spans and {points} points of metrics")
    else:
        print(f"Written to {path}: open it at https://ui.perfetto.dev")
