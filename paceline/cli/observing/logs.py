"""``paceline logs``: search the records of a run, which may still train."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigError
from paceline.observe.records import Record, printable

if TYPE_CHECKING:
    from paceline.observe.index import RecordIndex, Search

Run = Annotated[
    str | None,
    typer.Argument(help="Name or folder of the run; by default the newest.", metavar="RUN", show_default=False),
]
Step = Annotated[str | None, typer.Option(help="Step A, or the steps from A to B - 1.", metavar="A[:B]")]
Collect = Annotated[
    list[Path] | None,
    typer.Option(help="Folder of the same run from another machine; may be repeated.", metavar="FOLDER"),
]
RunsDir = Annotated[Path, typer.Option(help="Directory of the runs.")]
CONTEXT: dict[str, object] = {}
MORE_HELP = """ The run may still train, or have died.

Each record is an event of a worker, or of the launcher: a step, an exchange of data, a loss, a checkpoint. All given
conditions must hold. The exit code is 0 even if no record is found.
"""
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_COMMON = ("time", "event", "rank", "generation", "step")
_POLL_SECONDS = 0.2


def command(  # noqa: PLR0913 - each argument is an option
    run: Run = None,
    rank: Annotated[
        list[str] | None, typer.Option(help="Records of this rank, or of `launcher`; may be repeated.")
    ] = None,
    step: Step = None,
    event: Annotated[
        list[str] | None, typer.Option(help="Records of this event, such as `exchange`; may be repeated.")
    ] = None,
    slower_than: Annotated[
        str | None, typer.Option(help="Records that took at least this long, such as 50ms.", metavar="TIME")
    ] = None,
    text: Annotated[str, typer.Option(help="Records whose text contains these words.", metavar="WORDS")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with records as they are written.")] = False,
    sql: Annotated[
        str | None, typer.Option(help="Print the rows of an SQL query on the table `records`.", metavar="QUERY")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object in each line.")] = False,
    parquet: Annotated[
        Path | None, typer.Option(help="Write the records to a Parquet file.", metavar="FILE", show_default=False)
    ] = None,
    collect: Collect = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Search the records of a run."""
    from paceline.observe.index import Search

    search = Search(
        ranks=tuple(rank or ()),
        events=tuple(event or ()),
        steps=None if step is None else steps_of(step),
        slower_than=None if slower_than is None else seconds_of(slower_than),
        text=text,
    )
    _check_together(sql, follow, as_json, parquet, search == Search())
    try:
        with up_to_date(runs_dir, run, collect) as (_, index):
            if sql is not None:
                _print_rows(index, sql, as_json)
            elif parquet is not None:
                from paceline.observe.parquet import write

                print(f"{write(index.find(search), parquet)} records written to {parquet}")
            else:
                for record in _followed(index, search) if follow else (record for _, record in index.find(search)):
                    print(json.dumps(record) if as_json else line_of(record), flush=follow)
            if index.skipped:
                print(f"{index.skipped} damaged lines were left out.", file=sys.stderr)
    except BrokenPipeError:  # a reader such as `head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports it once more at the end
    except KeyboardInterrupt:
        pass


@contextmanager
def up_to_date(runs_dir: Path, run: str | None, collect: list[Path] | None) -> Iterator[tuple[Path, RecordIndex]]:
    """Return a context with the directory of a run and the index of its records, which it closes."""
    from paceline.launchers.runs import found
    from paceline.observe.index import RecordIndex

    folder = found(runs_dir, run)
    with closing(RecordIndex(folder, collect or ())) as index:
        index.update()
        yield folder, index


def _check_together(sql: str | None, follow: bool, as_json: bool, parquet: Path | None, all_records: bool) -> None:
    """Raise ConfigError if options were given that exclude each other."""
    if sql is not None and (follow or parquet is not None or not all_records):
        raise ConfigError("--sql selects the records: write the conditions into the query. Only --json can be added.")
    if (follow or as_json) and parquet is not None:
        raise ConfigError("--parquet writes a whole file, so it cannot be used with --follow or --json.")


def _followed(index: RecordIndex, search: Search) -> Iterator[Record]:
    """Yield all matching records, then new ones as they are written, until the user interrupts."""
    last = 0
    while True:
        found = list(index.find(search, after=last))
        for number, record in found:
            last = max(last, number)
            yield record
        time.sleep(_POLL_SECONDS)
        index.update()


def _print_rows(index: RecordIndex, statement: str, as_json: bool) -> None:
    columns, rows = index.query(statement)
    if not as_json:
        print("\t".join(columns))
    for row in rows:
        if as_json:
            print(json.dumps(dict(zip(columns, row, strict=True)), default=repr))
        else:
            print("\t".join("" if value is None else shown(value) for value in row))


def steps_of(text: str) -> range:
    """Return the steps that ``A`` or ``A:B`` names.

    >>> steps_of("800"), steps_of("800:820"), steps_of(":3")
    (range(800, 801), range(800, 820), range(0, 3))
    """
    if (found := re.fullmatch(r"(\d{1,18})|(\d{0,18}):(\d{0,18})", text)) is None:
        raise ConfigError(f"--step {text!r} names no steps: write --step 800, or --step 800:820 for 800 to 819.")
    one, first, stop = found.groups()
    steps = range(int(one), int(one) + 1) if one else range(int(first or 0), int(stop) if stop else sys.maxsize)
    if not steps:
        raise ConfigError(f"--step {text} names no steps: the first number must be the smaller one.")
    return steps


def seconds_of(text: str) -> float:
    """Return a duration in seconds.

    >>> seconds_of("50ms"), seconds_of("1.5 s"), seconds_of("2")
    (0.05, 1.5, 2.0)
    """
    if (found := re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(us|ms|s|m|h)?", text.strip())) is None:
        raise ConfigError(f"--slower-than {text!r} is not a time: write a number and us, ms, s, m or h, such as 50ms.")
    return float(found[1]) * _UNITS[found[2] or "s"]


def line_of(record: Record) -> str:
    """Return a record as a line: local time, rank, step, event and all other fields."""
    rank = f"rank {record['rank']}" if isinstance(record["rank"], int) else shown(record["rank"])
    step = f"step {record['step']}" if "step" in record else ""
    rest = " ".join(f"{shown(key)}={shown(value)}" for key, value in record.items() if key not in _COMMON)
    return f"{_clock(record['time'])}  {rank:<8}  {step:<10}  {shown(record['event']):<12}  {rest}".rstrip()


def _clock(seconds: float) -> str:
    """Return the local time of day in milliseconds, or the number itself if it is not a date."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%H:%M:%S.%f")[:-3]
    except (OverflowError, ValueError, OSError):
        return str(seconds)


def shown(value: Any) -> str:
    """Return a value as text without characters that a terminal would act on.

    >>> shown(0.25), shown("lost"), shown([1, 2])
    ('0.25', 'lost', '[1, 2]')
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    return printable(value if isinstance(value, str) else json.dumps(value, default=repr))
