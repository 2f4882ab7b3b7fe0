"""``paceline timeline``: draw a step of a pipeline, with the predicted times above the measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.display import table
from paceline.cli.observing.logs import Run, RunsDir
from paceline.errors import ConfigError

CONTEXT: dict[str, object] = {}
MORE_HELP = """ Reads the events of a run with strategy pipeline, which may still be running.

The drawing is one self-contained HTML file. Exit code: 2 if the run was no pipeline on several workers.
"""


def command(
    run: Run = None,
    step: Annotated[int | None, typer.Option(help="The step to draw.", show_default="one of median length")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Where to write the page.", metavar="FILE", show_default="timeline.html of the run"),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Draw a step of a pipeline, predicted above measured."""
    from paceline.launchers.runs import found
    from paceline.observe.timeline import summary
    from paceline.observe.timeline.comparison import compare
    from paceline.observe.timeline.page import html

    folder = found(runs_dir, run)
    comparison = compare(folder, step)
    page = output or folder / "timeline.html"
    try:
        page.write_text(html(comparison), encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{page} cannot be written: {error.strerror}. Name another file with --output.") from None
    print(summary.headline(comparison))
    print()
    print("\n".join(table.lines(summary.totals(comparison))))
    print()
    print("\n".join(table.lines(summary.workers(comparison))))
    print()
    sentences = summary.waiting(comparison), summary.duration(comparison), summary.clocks(comparison), comparison.source
    for sentence in sentences:
        if sentence:
            print(sentence)
    print(f"Written to {page}")
