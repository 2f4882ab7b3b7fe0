"""``paceline verify``: train a few steps with several numbers of workers and compare everything computed."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.display import table
from paceline.cli.observing.logs import RunsDir
from paceline.cli.options import Arguments, Plan, Script, Set
from paceline.cli.report import run_quietly
from paceline.environments import env
from paceline.errors import ConfigError, counted
from paceline.launchers.base import Request

if TYPE_CHECKING:
    from paceline.diagnostics.verify.compare import Comparison
    from paceline.diagnostics.verify.run_trace import RunTrace

CONTEXT = {"allow_interspersed_args": True, "ignore_unknown_options": True}
MORE_HELP = """ Or find where two runs begin to differ: paceline verify RUN RUN.

Options may also follow the script; what follows -- is passed to the script.

Exit code: 0 if all sizes train the same (up to rounding, unless exact is set), or both runs have the same bits;
otherwise 1.
"""


@dataclass(frozen=True)
class Size:
    """Run of the script with a number of workers."""

    workers: int
    trace: RunTrace
    seconds: float


def command(
    script: Script,
    arguments: Arguments = None,
    workers: Annotated[str, typer.Option(help="Sizes to compare; the first is the reference.")] = "1,2,3,4",
    steps: Annotated[int, typer.Option(help="Steps to train at each size.")] = 20,
    set_: Set = None,
    plan: Plan = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Check that a script trains the same on any number of workers, or compare two runs."""
    from paceline import config
    from paceline.launchers.prepare import check

    if len(arguments or ()) == 1 and script.suffix != ".py" and not script.is_file():
        from paceline.cli.observing.parting import compare

        raise typer.Exit(compare(runs_dir, str(script), (arguments or [])[0]))
    sizes = _sizes(workers, steps)
    settings = config.parse_command_line(set_ or [])
    base = Request(script, tuple(arguments or ()), settings=settings, plan=plan)
    check(replace(base, workers=max(sizes)))
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as directory:
        found = [_run(base, size, steps, Path(directory)) for size in sizes]
    raise typer.Exit(_print_result(found))


def _sizes(text: str, steps: int) -> list[int]:
    from paceline.config import quoted

    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--workers {quoted(text)}: write numbers with commas, such as 1,2,4.") from None
    if min(sizes) < 1 or len(sizes) < 2 or len(set(sizes)) < len(sizes):
        raise ConfigError(f"--workers {quoted(text)}: name two or more different sizes, each at least 1.")
    if steps < 1:
        raise ConfigError(f"--steps {steps}: at least one step must be compared.")
    return sizes


def _run(base: Request, workers: int, steps: int, directory: Path) -> Size:
    from paceline.diagnostics.verify.run_trace import read

    traces = directory / f"trace-{workers}"
    traces.mkdir()
    asked = {env.TRACE_DIRECTORY: str(traces), env.TRACE_STEPS: str(steps)}
    request = replace(base, workers=workers, runs=directory, name=f"run-{workers}", environment=asked)
    print(f"{steps} steps on {counted(workers, 'worker')} ...", file=sys.stderr, flush=True)
    seconds = run_quietly(request)
    return Size(workers, read(traces / "trace.jsonl"), seconds)


def _print_result(sizes: list[Size]) -> int:
    from paceline.diagnostics.verify.compare import compare

    reference, *others = sizes
    found = [(size, compare(reference.trace, size.trace)) for size in others]
    exact = all(size.trace.exact for size in sizes)
    rows = [("workers", "result", "fingerprint", "seconds"), _row(reference, "reference")]
    rows += [_row(size, comparison.result) for size, comparison in found]
    print("\n".join(table.lines(rows)))
    print()
    causes: dict[str, list[str]] = {}
    for size, comparison in found:
        if comparison.result != "identical":
            causes.setdefault(comparison.cause, []).append(f"  {counted(size.workers, 'worker')}: {_where(comparison)}")
    for cause, where in causes.items():
        print("\n".join([*where, cause]))
    if not causes:
        print(f"The same bits in {len(reference.trace.records) - 1} steps at every size.")
    results = {comparison.result for _, comparison in found}
    return 1 if "different" in results or (exact and "rounding" in results) else 0


def _row(size: Size, result: str) -> tuple[str, ...]:
    return (str(size.workers), result, size.trace.fingerprint(), f"{size.seconds:.1f}")


def _where(comparison: Comparison) -> str:
    parts = []
    if comparison.first is not None:
        parts.append(f"the bits first differ in the {comparison.first}")
    if (beyond := comparison.beyond) is not None:
        values = f" ({beyond.reference} against {beyond.other})" if beyond.reference is not None else ""
        parts.append(f"more than rounding in the {beyond}{values}")
    return "; ".join(parts)
