"""``paceline tune``: recommend a learning rate and a batch from short branches of a script."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cli.options import BEFORE_SCRIPT, Arguments, Plan, Script, Set
from paceline.cli.report import run_quietly, say
from paceline.environments import env
from paceline.errors import ConfigError, InputError
from paceline.launchers.base import Request

if TYPE_CHECKING:
    from paceline.observe.noise import NoiseScale
    from paceline.observe.records import Record
    from paceline.observe.tuning import Advice, Branch

CONTEXT = BEFORE_SCRIPT
MORE_HELP = """ It only advises, and changes no run.

Options go before the script; all that follows it is passed to the script.

Exit code: 1 if the branches show no recommendation, 2 if the script cannot be tuned.
"""
_EVENTS = ("branch", "step", "branch-end", "microbatch-norm")
_AUDIT = "4"  # steps between samples of the gradient noise scale
_MULTIPLES = (0.5, 1, 2, 4, 8)


def command(  # noqa: PLR0913 - each argument is an option
    script: Script,
    arguments: Arguments = None,
    workers: Annotated[int, typer.Option("--workers", "-n", help="Workers of each branch.")] = 1,
    only: Annotated[Literal["rate", "batch"] | None, typer.Option(help="Tune this alone.", show_default="both")] = None,
    branches: Annotated[
        int, typer.Option(help="Branches of each kind, each with its own order of samples.", min=1)
    ] = 3,
    steps: Annotated[int, typer.Option(help="Steps of a branch of the learning-rate test.", min=20)] = 100,
    span: Annotated[
        str, typer.Option(help="Learning rates to try, as multiples of that of the script.", metavar="LOW:HIGH")
    ] = "0.001:1000",
    samples: Annotated[
        int | None, typer.Option(help="Samples of a branch of the batch test.", show_default="128 batches", min=1)
    ] = None,
    set_: Set = None,
    plan: Plan = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    runs_dir: Annotated[Path, typer.Option(help="Where the branches and the page go.")] = Path("runs"),
) -> None:
    """Recommend a learning rate and a batch."""
    from paceline import config
    from paceline.observe.tuning import critical_batch, learning_rate
    from paceline.observe.tuning.page import draw_batches, draw_rates, html

    settings = config.parse_command_line(set_ or [])
    for key, cure in (("resume", "begin with its weights, as in --set weights=PATH"), ("seed", "branches vary it")):
        if key in settings:
            raise ConfigError(f"--set {key}={settings[key]} has no meaning for paceline tune: {cure}.")
    lowest, highest = _span(span)
    folder = runs_dir / f"tune-{script.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    start = _BranchRunner(script, tuple(arguments or ()), workers, settings, plan, folder)
    found: dict[str, Advice] = {}
    tests = []
    if only != "batch":
        tried = [start.branch(f"rate-{seed + 1}", seed, steps, lowest, highest)[0] for seed in range(branches)]
        found["learning_rate"] = advice = learning_rate(tried)
        draw = partial(draw_rates, branches=tried, advice=advice) if all(one.losses for one in tried) else None
        tests.append(("Learning rate", draw, [_sentence("learning rate", advice)]))
    noise: NoiseScale | None = None
    if only != "rate":
        tried, noise = _batches(start, branches, samples)
        found["batch"] = advice = critical_batch(tried)
        tests.append(
            (
                "Batch",
                partial(draw_batches, branches=tried, advice=advice),
                [_sentence("batch", advice), *_noise(noise)],
            )
        )
    page = folder / "tune.html"
    page.write_text(html(f"paceline tune {script.name}", tests), encoding="utf-8", errors="replace")
    if as_json:
        answer = {name: asdict(advice) for name, advice in found.items()}
        print(json.dumps({**answer, "noise": None if noise is None else asdict(noise), "page": str(page)}))
    else:
        print("\n".join([line for _, _, sentences in tests for line in sentences] + [f"Written to {page}"]))
    if any(advice.value is None for advice in found.values()):
        raise typer.Exit(1)


def _span(text: str) -> tuple[float, float]:
    """Return the smallest and the largest multiple of the script's learning rate."""
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low = high = 0.0
    if not 0 < low < high < math.inf:
        raise ConfigError(f"--span {text!r}: give two multiples of the script's rate, as in --span 0.001:1000.")
    return low, high


@dataclass(frozen=True)
class _BranchRunner:
    """Runner of branches, with the arguments that all of them share."""

    script: Path
    arguments: tuple[str, ...]
    workers: int
    settings: Mapping[str, str]
    plan: Path | None
    folder: Path

    def branch(
        self, name: str, seed: int, steps: int, first: float, last: float, settings: Mapping[str, str] | None = None
    ) -> tuple[Branch, list[Record]]:
        """Run a branch whose learning-rate factor goes from ``first`` to ``last``. Return it with its records."""
        from paceline.observe import records
        from paceline.observe.tuning import branch_of

        say(f"branch {name}: {steps} steps")
        asked = json.dumps({"steps": steps, "first": first, "last": last})
        given = {**self.settings, **(settings or {}), "seed": str(seed)}
        run_quietly(
            Request(
                *(self.script, self.arguments, self.workers, given, self.plan, self.folder, name),
                environment={env.BRANCH: asked},
            ),
            stays=True,
        )
        found = [one for one in records.read(self.folder / name, _EVENTS) if one["rank"] == 0 or one["event"] != "step"]
        branch = branch_of(found, seed)
        if branch is None:
            raise InputError(f"{self.script} ended without a step, so there is nothing to tune.")
        if not any(one["event"] == "branch-end" for one in found):
            raise InputError(
                f"{self.script} ended after {len(branch.losses)} of the {steps} steps of branch {name}: let it train "
                f"for longer, or give fewer --steps or --samples."
            )
        return branch, found


def _batches(start: _BranchRunner, count: int, samples: int | None) -> tuple[list[Branch], NoiseScale | None]:
    """Run the branches of the batch test. Return them with the gradient noise scale of the first one."""
    from paceline.observe.noise import NoiseRecords
    from paceline.observe.tuning import factor_of

    sampled = {} if "audit" in start.settings else {"audit": _AUDIT}
    first, found = start.branch("batch-0", 0, 1, 1.0, 1.0)
    about = next(one for one in found if one["event"] == "branch")
    whole = samples or 128 * first.batch
    norms, tried = NoiseRecords(), []
    for multiple in _MULTIPLES:
        batch = round(first.batch * multiple)
        if (steps := round(whole / batch)) < 1 or batch < about["microbatches"]:
            continue
        size = {"batch_per_worker": batch // start.workers} if about["per_worker"] else {"batch": batch}
        for seed in range(count):
            factor = factor_of(about["optimizer"], multiple)
            name, given = f"batch-{batch}-{seed + 1}", {key: str(value) for key, value in size.items()} | sampled
            branch, found = start.branch(name, seed, steps, factor, factor, given)
            tried.append(branch)
            for record in found if multiple == 1 and seed == 0 else ():
                norms.add(record)
    return tried, norms.scale()


def _sentence(name: str, advice: Advice) -> str:
    if advice.value is None:
        return f"{name}: none can be recommended: {advice.reason}"
    if advice.low is None:
        around = "one branch has no interval"
    elif advice.high is None:
        around = f"at least {advice.low:.3g}"
    else:
        around = f"{advice.low:.3g} to {advice.high:.3g}"
    return f"{name}: {advice.value:.3g} ({around}): {advice.reason}"


def _noise(found: NoiseScale | None) -> Sequence[str]:
    from paceline.observe.noise import sentence

    return [] if found is None else [f"{sentence(found)}; it assumes SGD, and is a guide only"]
