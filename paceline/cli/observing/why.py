"""``paceline why``: say where the time of a run went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.observing.logs import Collect, Run, RunsDir, up_to_date
from paceline.errors import InputError

CONTEXT: dict[str, object] = {}
MORE_HELP = """ Names the rank, the stage or the part of a step that takes more time than necessary.

The run may still train. Exit code: 2 without a complete step.
"""


def command(
    run: Run = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print an object with culprits, advice and noise as JSON.")
    ] = False,
    collect: Collect = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Say where the time of a run went."""
    from paceline.observe.index import Search
    from paceline.observe.why import EVENTS, STAGES, find
    from paceline.observe.why.text import sentences

    with up_to_date(runs_dir, run, collect) as (folder, index):
        records = (record for _, record in index.find(Search(events=EVENTS)))
        findings = find(records, dict(index.query(STAGES).rows))
    if not findings.steps:
        raise InputError(
            f"{folder} has no complete step with the waits of its workers, so there is nothing to compare. "
            f"See its records with paceline logs."
        )
    print(json.dumps(findings.data()) if as_json else "\n".join(sentences(findings)))
