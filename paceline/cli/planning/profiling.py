"""``paceline profile``: measure the cost of each layer of a model, and find where to cut it into stages."""

from __future__ import annotations

import math
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.display import table
from paceline.cli.options import Arguments, Plan, Script, Set
from paceline.cli.report import run_quietly
from paceline.environments import env
from paceline.errors import ConfigError, InputError
from paceline.launchers.base import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.planning.costs import Profile
    from paceline.schedule.balance import Cut

CONTEXT = {"allow_interspersed_args": True, "ignore_unknown_options": True}
MORE_HELP = """ The script runs up to paceline.start and no further.

Options may also follow the script; what follows -- is passed to the script.

Exit code: 1 if the script ends without calling paceline.start, 2 if the model cannot be cut in this way.
"""
_TRIED = (2, 3, 4)
_WHOLE = {"strategy": "allreduce", "compile": "false"}  # measure the whole model, without stages


def command(  # noqa: PLR0913 - each argument is an option
    script: Script,
    arguments: Arguments = None,
    workers: Annotated[
        int, typer.Option("--workers", "-n", help="Workers to start; with 2 or more, measure the link between them.")
    ] = 1,
    stages: Annotated[int | None, typer.Option(help="Number of stages; by default 2, 3 and 4.")] = None,
    memory: Annotated[
        float | None, typer.Option(help="Memory of a worker, in GB; unlimited by default.", metavar="GB")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the cut to a plan file; needs --stages.", metavar="FILE")
    ] = None,
    set_: Set = None,
    plan: Plan = None,
) -> None:
    """Measure the layers of a model, and find where to cut it into stages."""
    from paceline import config
    from paceline.planning.costs import plan_text

    if stages is not None and stages < 1:
        raise ConfigError(f"--stages {stages}: a model is cut into at least 1 stage.")
    if memory is not None and not 0 < memory < math.inf:
        raise ConfigError(f"--memory {memory}: give a number of gigabytes above 0.")
    if output is not None and stages is None:
        raise ConfigError("--output writes one cut: set the number of stages with --stages.")
    settings = {**config.parse_command_line(set_ or []), **_WHOLE}
    found = _measure(Request(script, tuple(arguments or ()), workers, settings, plan))
    if found.uncut:
        raise InputError(found.uncut)
    print("\n".join(_layer_lines(found)))
    if stages is None and len(found.layers) == 1:
        raise ConfigError(f"{found.model} has one layer, {found.layers[0].name!r}: there is nothing to cut.")
    print()
    tried = [stages] if stages is not None else [count for count in _TRIED if count <= len(found.layers)]
    cuts = [_cut(found, count, workers, memory) for count in tried]
    print("\n".join(_cut_lines(cuts)))
    if found.link_bytes_per_second is None:
        print("Transfers count as free: use -n 2 or more to measure the link.")
    if output is not None:
        output.write_text(plan_text(found, cuts[0]))
        again = ["paceline", "run", "-n", sum(cuts[0].replicas), "--plan", output, script, *(arguments or ())]
        print(f"Written to {output}: {shlex.join(map(str, again))}")


def _measure(base: Request) -> Profile:
    from paceline.planning.costs import read

    with tempfile.TemporaryDirectory(prefix="paceline-profile-") as directory:
        answer = Path(directory) / "profile.json"
        request = replace(base, runs=Path(directory), name="run", environment={env.PROFILE: str(answer)})
        run_quietly(request)
        if not answer.exists():
            print(f"paceline: {base.script} ended without calling paceline.start.", file=sys.stderr)
            raise typer.Exit(1)
        return read(answer)


def _cut(found: Profile, stages: int, workers: int, memory: float | None) -> Cut:
    from paceline.schedule.balance import balance

    return balance(found.layers, stages, found.cluster(max(workers, stages), None if memory is None else memory * 1e9))


def _layer_lines(found: Profile) -> list[str]:
    rows: list[tuple[str, ...]] = [("layer", "forward ms", "backward ms", "parameters", "kept", "to the next")]
    for layer in found.layers:
        times = (f"{1000 * layer.forward:.3f}", f"{1000 * layer.backward:.3f}")
        sizes = (layer.parameter_bytes, layer.kept_bytes, layer.output_bytes)
        rows.append((layer.name, *times, *map(_size, sizes)))
    link = found.link_bytes_per_second
    link_text = f"; link {8e-6 * link:,.0f} Mbit/s" if link is not None else ""
    return [f"{found.model}, microbatches of {found.samples} samples{link_text}", "", *table.lines(rows)]


def _cut_lines(cuts: Sequence[Cut]) -> list[str]:
    rows = [("stages", "slowest ms", "each ms", "workers", "cut")]
    for cut in cuts:
        each = " ".join(f"{1000 * seconds:.3f}" for seconds in cut.seconds)
        replicas = " ".join(map(str, cut.replicas))
        rows.append((str(len(cut.bounds)), f"{1000 * cut.slowest:.3f}", each, replicas, ", ".join(cut.names)))
    return table.lines(rows)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
