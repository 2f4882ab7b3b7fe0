import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline.cli
from paceline.cli.main import COMMANDS

Paceline = Callable[..., Any]

ROOT = Path(paceline.cli.__file__).parents[2]
HEAVY = ("torch", "numpy", "rich", "sklearn")

IMPORTED = f"""
import sys
from paceline.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def imported_by(*arguments: str) -> str:
    command = [sys.executable, "-c", IMPORTED, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert imported_by(*arguments) == "[]"


def test_a_run_does_not_import_torch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')")
    assert imported_by("run", "--runs-dir", str(tmp_path), str(script)) == "[]"


def test_help_names_every_command(paceline: Paceline) -> None:
    result = paceline("--help")
    assert result.code == 0
    assert all(name in result.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(paceline: Paceline, name: str) -> None:
    assert COMMANDS[name].split()[0] in paceline(name, "--help").out


def test_version(paceline: Paceline) -> None:
    assert paceline("--version").out.startswith("paceline ")


def test_an_unknown_command(paceline: Paceline) -> None:
    result = paceline("rnu")
    assert result.code == 2
    assert "run" in result.err


def test_the_options_of_run(paceline: Paceline) -> None:
    """The command line is a promise: change this list with care."""
    words = paceline("run", "--help").out.replace(",", " ").split()
    assert {word for word in words if word.startswith("-") and word.strip("-")} == {
        *("-n", "-np", "--workers", "--nproc-per-node", "--set", "--resume", "--name", "--runs-dir"),
        *("--plan", "--port", "--quiet", "--help", "--elastic", "--standby", "--nodes", "--nnodes"),
        *("--rendezvous", "--secret-file", "--patience", "--grace", "--on", "--dry-run", "-H", "--hosts", "--hostfile"),
        *("--time", "--partition", "--account", "--gpus", "--image", "--namespace", "--kind", "--volume", "--address"),
        *("--master", "--detach", "--horovod", "--host-discovery-script", "--no-preload"),
    }
