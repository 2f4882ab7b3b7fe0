"""``paceline config``: show each setting of a script, its value and the source of the value."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import typer

from paceline.cli.display import table
from paceline.cli.options import BEFORE_SCRIPT, Arguments, Plan, Script, Set
from paceline.environments import env
from paceline.launchers.base import Launch, Request

CONTEXT = BEFORE_SCRIPT
MORE_HELP = """ The script runs up to paceline.start and no further.

Exit code: 1 if the script ends without calling paceline.start, 2 for a wrong setting.
"""


def command(script: Script, arguments: Arguments = None, set_: Set = None, plan: Plan = None) -> None:
    """Show each setting of a script and where it came from."""
    from paceline import config
    from paceline.launchers.prepare import check, known_settings

    request = Request(script, tuple(arguments or ()), settings=config.parse_command_line(set_ or []), plan=plan)
    check(request)
    known_settings(request)
    shown = ask_script(request)
    rows: list[tuple[str, ...]] = [("setting", "value", "from", "what it is")]
    for key, value in shown["settings"].items():
        rows.append((key, config.shown(value), str(shown["sources"].get(key, "")), config.describe(key)))
    print("\n".join(table.lines(rows)))


def ask_script(request: Request) -> dict[str, dict[str, object]]:
    """Run the script in a process until ``paceline.start`` writes the settings and exits. Return the settings."""
    with tempfile.TemporaryDirectory(prefix="paceline-config-") as directory:
        answer = Path(directory) / "settings.json"
        mine = {env.SHOW_CONFIG: str(answer), env.SETTINGS: json.dumps(dict(request.settings))}
        if request.plan is not None:
            mine[env.PLAN] = str(request.plan.resolve())
        launch = Launch(request.script, request.arguments, 1, Path(directory), {**env.inherited(), **mine})
        ended = subprocess.run(
            launch.command(),
            env=dict(launch.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if answer.exists():
            shown: dict[str, dict[str, object]] = json.loads(answer.read_text())
            return shown
    sys.stderr.write(ended.stdout)
    if ended.returncode == 0:
        print(f"paceline: {request.script} ended without calling paceline.start.", file=sys.stderr)
        raise typer.Exit(1)
    print(f"paceline: {request.script} failed before paceline.start; see its output above.", file=sys.stderr)
    raise typer.Exit(ended.returncode if ended.returncode > 0 else 128 - ended.returncode)
