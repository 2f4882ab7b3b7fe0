"""Messages of ``paceline run`` besides progress: alerts during the run, and the result or cause of failure."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import typer

from paceline.environments import env
from paceline.errors import name_ranks
from paceline.launchers.base import Launch, Request, RunResult
from paceline.launchers.local.kernel import state_of
from paceline.observe.records import Record, parsed
from paceline.system.regular_files import open_regular

if TYPE_CHECKING:
    from paceline.coordinator.failure.coordinator_report import CoordinatorReport
    from paceline.coordinator.monitor import Alert, RunMonitor

_PROGRESS = ("lost", "short", "joined")
_SEE_SECONDS = 1.0
_LOG_BYTES = 1 << 20
_EVENT_BYTES = 64 << 20
_MOST_RANKS = 4
_MOST_WARNINGS = 3
_WARNING_LENGTH = 300  # maximum number of warnings after the cause of a failure, and of characters of each
_WARNING = b'"warning": true'


def report(
    launch: Launch,
    result: RunResult,
    request: Request | None,  # launch request. None if the run cannot be resumed.
    coordinator: CoordinatorReport | None = None,
    seen: int | None = 0,  # number of the worker whose output was shown
    stays: bool = True,  # whether the run's folder stays
) -> int:
    """Print why the workers ended, with the root cause first, and write it to ``failure.txt`` and ``failure.json``.

    Returns:
        the exit code, 0 if the run did not fail.
    """
    from paceline.coordinator.failure import message
    from paceline.coordinator.failure.coordinator_report import CoordinatorReport
    from paceline.coordinator.failure.root_cause import diagnose
    from paceline.launchers.runs import newest_checkpoint

    coordinator = coordinator or CoordinatorReport()
    if (failure := diagnose(launch, result, coordinator, seen)) is None:
        return 0
    kept = launch.run / (f"failure-{launch.first}.txt" if launch.first else "failure.txt")
    context = message.Context(
        launch.workers,
        message.shown_path(launch.run / "output") if stays else "",
        message.shown_path(kept),
        newest_checkpoint(launch.run) if request is not None else None,
        resume_command(launch, request) if request is not None else "",
        coordinator,
    )
    lines = [*message.short(failure, context), *message.details(failure), *_warned(launch.run / "events", stays)]
    _keep(kept, "\n".join(lines) + "\n")
    _keep(kept.with_suffix(".json"), json.dumps(message.record(failure, context), indent=1) + "\n")
    for line in lines:
        say(line)
    return failure.code


def run_quietly(request: Request, stays: bool = False) -> float:
    """Run workers without showing their output, and return the seconds. Exit with a report if the run fails.

    Args:
        stays: whether the run's folder stays, so that the report may name its files.
    """
    from paceline.launchers.prepare import prepare
    from paceline.launchers.workers import Workers

    with prepare(request) as launch:
        with Workers(launch, lambda name, line: None, note=say) as running:
            result = running.wait()
        if code := report(launch, result, None, seen=None, stays=stays):
            raise typer.Exit(code)
    return result.seconds


def _warned(events: Path, stays: bool) -> list[str]:
    """Return the first warnings of ranks other than rank 0, briefly, because one may explain the failure."""
    found = warnings_elsewhere(events)
    lines = [f"warned before: {shorten(one, _WARNING_LENGTH, placeholder=' ...')}" for one in found[:_MOST_WARNINGS]]
    more = len(found) - len(lines)
    return [*lines, f"warned before: {more} more{f', as notes in {events}' * stays}"] if more > 0 else lines


def _keep(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        say(f"{path} could not be written: {error.strerror}")


def resume_command(launch: Launch, request: Request) -> str:
    """Return the command or the call of ``paceline.launch`` that resumes this run from its newest checkpoint."""
    from paceline.cli.display.alerts import shown
    from paceline.launchers import call_worker
    from paceline.launchers.clusters.base import given_options

    if request.script == Path(call_worker.__file__):
        return f"paceline.launch(..., name={launch.run.name!r}, settings={{'resume': 'auto'}})"
    notify = request.notify and shown(request.notify)
    again = replace(request, name=launch.run.name, settings={**request.settings, "resume": "auto"}, notify=notify)
    words = ["paceline", "run", *given_options(again)]
    if by := env.text(env.USER_COMMAND):  # on a cluster this launcher is an agent
        words = [*shlex.split(by), "--name", launch.run.name, "--resume", "auto"]
    return shlex.join([*words, str(request.script), *request.arguments])


def alerts_of(monitor: RunMonitor, launch: Launch, elastic: bool, quiet: bool) -> Callable[[], list[str]]:
    """Return a function that returns the new alerts since its last call, as lines for the user."""

    def take() -> list[str]:
        lines = []
        while monitor.alerts and not _too_early(monitor.alerts[0], monitor):
            alert = monitor.alerts.popleft()
            if alert.kind not in _PROGRESS or (elastic and not quiet):
                lines.append(_line(alert, monitor, launch))
        return lines

    return take


def _too_early(alert: Alert, monitor: RunMonitor) -> bool:
    """Return whether to delay an alert about a loss until the launcher, which notices last, has the exit status."""
    number = alert.workers[0] if alert.workers else -1
    unseen = alert.kind == "lost" and monitor.pid_of(number) and number not in monitor.exit_texts
    return bool(unseen) and time.monotonic() - alert.time < _SEE_SECONDS


def _line(alert: Alert, monitor: RunMonitor, launch: Launch) -> str:
    """Return the line for an alert. For an absent worker, add the state of its process and its last output."""
    from paceline.coordinator.failure.worker_report import tail

    if alert.kind == "lost":
        return f"lost: {monitor.exit_texts.get(alert.workers[0], alert.text)}"
    if alert.kind != "absent" or len(alert.workers) != 1:
        return alert.text
    (number,) = alert.workers
    state = state_of(monitor.pid_of(number))
    printed = tail(launch, number, 1)
    last = f"its last output: {printed[0]!r}" if printed else "it has printed nothing"
    return f"{alert.text}; the process {state or 'is alive'}, {last}"


def summary(coordinator: CoordinatorReport) -> str:
    """Return a line with the numbers of lost and replaced workers, or an empty string if none was lost."""
    from paceline.coordinator.failure.message import lost_in_words

    return lost_in_words(coordinator) if coordinator.lost else ""


def say(line: str) -> None:
    """Print a line on stderr, where the messages of the launcher go."""
    encoding = sys.stderr.encoding or "utf-8"
    print(line.encode(encoding, "replace").decode(encoding), file=sys.stderr, flush=True)


def hint_of(launch: Launch, request: Request, coordinator: CoordinatorReport, lines: Sequence[str]) -> str:
    """Return a hint for a run without a failure, or an empty string. ``lines``: lines that rank 0 printed."""
    from paceline.launchers import call_worker

    if not (coordinator.ranks or request.horovod or request.script == Path(call_worker.__file__)):
        return (
            f"note: {request.script.name} did not call paceline.start, so Paceline trained nothing. Unless the script "
            f"uses torch.distributed itself, every worker ran all of it independently. Start training with "
            f"session = paceline.start(...)."
        )
    hints = [
        *warnings_elsewhere(launch.run / "events"),
        _printed_everywhere(lines, launch.run / "output", request.workers),
    ]
    return "\n".join(filter(None, hints))


def warnings_elsewhere(events: Path) -> list[str]:
    """Return each distinct warning of other ranks that rank 0 did not record, so that the terminal did not show it."""
    ranks: dict[str, set[int]] = {}
    for path in sorted(events.glob("rank-*.jsonl")):
        for record in _warnings_in(path):
            ranks.setdefault(str(record.get("text")), set()).add(int(record["rank"]))
    return [f"{name_ranks(found, most=_MOST_RANKS)}: {text}" for text, found in ranks.items() if 0 not in found]


def _warnings_in(path: Path) -> Iterator[Record]:
    try:
        with open_regular(path) as file:
            data = file.read(_EVENT_BYTES)
    except OSError:
        return
    at = data.find(_WARNING)
    while at >= 0:
        begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
        record = parsed(data[begin : end if end >= 0 else None].decode(errors="replace"))
        if record is not None and record["event"] == "note":
            yield record
        at = data.find(_WARNING, max(end, at + 1))


def _printed_everywhere(lines: Sequence[str], output: Path, workers: int) -> str:
    """Return a note if all ranks printed a line of rank 0, according to the logs in ``output``, otherwise ""."""
    from paceline.config import quoted

    common = set(filter(str.strip, lines))
    for rank in range(1, workers):
        try:
            with (output / f"rank-{rank}.log").open("rb") as file:
                common &= set(file.read(_LOG_BYTES).decode(errors="replace").splitlines())
        except OSError:
            return ""
    first = next((line for line in lines if line in common), None)
    if first is None or workers == 1:
        return ""
    return (
        f"note: all {workers} workers printed {quoted(first.strip())}; the terminal shows rank 0. session.print prints "
        f"on rank 0 alone, and session.is_main tells which worker that is."
    )
