import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline.cli
from paceline import __version__ as version
from paceline.cli.main import COMMANDS

Paceline = Callable[..., Any]

ROOT = Path(paceline.cli.__file__).parents[2]
HEAVY = ("torch", "numpy", "rich", "sklearn")

IMPORTED = f"""
import json, sys
from paceline.cli.main import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit:
        pass
    print("imported", words, [name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def imported_by(*commands: list[str]) -> set[str]:
    """What is imported after each of these commands, which one process runs after each other."""
    words = [sys.executable, "-c", IMPORTED, json.dumps(commands)]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stderr
    return {line for line in said.splitlines() if line.startswith("imported")}


def test_help_imports_nothing_heavy() -> None:
    commands = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    assert imported_by(*commands) == {f"imported {words} []" for words in commands}


def test_a_run_does_not_import_torch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')")
    words = ["run", "--runs-dir", str(tmp_path), str(script)]
    assert imported_by(words) == {f"imported {words} []"}


def test_help_names_every_command(paceline: Paceline) -> None:
    result = paceline("--help")
    assert result.code == 0
    assert all(name in result.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(paceline: Paceline, name: str) -> None:
    assert COMMANDS[name].split()[0] in paceline(name, "--help").out


def test_version(paceline: Paceline) -> None:
    said = paceline("--version").out
    assert re.match(rf"paceline {version}\nPython \d\S+, torch \d\S+, numpy \d\S+\nextras: .*\bdev\b", said), said


def test_the_shell_completes_commands_and_their_options() -> None:
    """By the function that bash gets from ``--show-completion``."""
    command = Path(sys.executable).with_name("paceline")
    script = f"""source <({command} --show-completion bash)
    for words in "pla" "plan --mem"; do
      COMP_WORDS=(paceline $words) COMP_CWORD=$(wc -w <<< "$words")
      _paceline_completion {command}
      echo "${{COMPREPLY[@]}}"
    done"""
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["plan", "--memory"], done.stderr


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
        *("--alert", "--notify"),
    }
