"""``paceline demo``: train on many workers, then on a single worker, and compare the results."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigError, counted
from paceline.launchers.base import Request

CONTEXT: dict[str, Any] = {}
MORE_HELP = " Exit code: 0 if the bits are the same, otherwise 1."

SCRIPT = Path(__file__).with_name("digits.py")
_BAR = 24


def command(workers: Annotated[int, typer.Option("--workers", "-n", help="Number of workers.")] = 4) -> None:
    """Train on handwritten digits, and show that the result does not depend on the number of workers."""
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError('The demo reads its digits from scikit-learn: pip install "paceline[demo]"')
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as directory:
        many = _train(workers, Path(directory))
        print("\n".join(curve(many["epochs"])))
        print(f"\ntest accuracy: {many['epochs'][-1]['accuracy']:.1%}\n", flush=True)
        one = _train(1, Path(directory) / "again")
    raise typer.Exit(_compare(workers, many["fingerprint"], one["fingerprint"]))


def _train(workers: int, directory: Path) -> dict[str, Any]:
    from paceline.cli.run import train

    print(f"training on {counted(workers, 'worker')} ...", file=sys.stderr, flush=True)
    directory.mkdir(exist_ok=True)
    result = directory / "result.json"
    code = train(Request(SCRIPT, (str(result),), workers, runs=directory / "runs"), closing=False)
    if code != 0:
        raise typer.Exit(code)
    shown: dict[str, Any] = json.loads(result.read_text())
    return shown


def curve(epochs: list[dict[str, float]]) -> list[str]:
    """Return the learning curve as rows of bars."""
    highest = max(epoch["loss"] for epoch in epochs)
    rows = [f"epoch  {'loss':<{_BAR + 8}}  test accuracy"]
    for number, epoch in enumerate(epochs, 1):
        loss = f"{epoch['loss']:<6.4f}  {_bar(epoch['loss'] / highest):<{_BAR}}"
        rows.append(f"{number:>5}  {loss}  {epoch['accuracy']:>6.1%}  {_bar(epoch['accuracy'])}")
    return rows


def _bar(part: float) -> str:
    block = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    return block * max(1, round(part * _BAR))


def _compare(workers: int, many: str, one: str) -> int:
    width = len(f"{workers} workers")
    print(f"\n{f'{workers} workers':<{width}}  {many}\n{'1 worker':<{width}}  {one}")
    if many == one:
        print("the same bits: parameters, buffers and optimizer state")
        return 0
    print("the results differ, which is a bug", file=sys.stderr)
    return 1
