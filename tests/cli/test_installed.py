"""The wheel of a release, installed beside the dependencies in an environment of its own, outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[2]


def output(folder: Path, *words: object, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "PYTHON"))}
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env={**environment, **variables}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(package: Path) -> set[str]:
    """Modules and data, such as ``py.typed``."""
    found = (path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(package).as_posix() for path in found}


@pytest.mark.slow
def test_a_release_trains_where_it_is_installed(tmp_path: Path) -> None:
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    for folder in ("paceline", ".ci"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source)
    elsewhere.mkdir()
    made = output(source, sys.executable, ".ci/dist.py", "dist", SOURCE_DATE_EPOCH="1700000000").split()
    (wheel,) = (path for path in made if path.endswith(".whl"))
    assert {Path(path).name.partition(paceline.__version__)[2] for path in made} == {
        *("-py3-none-any.whl", ".tar.gz", ".cdx.json")
    }

    venv.create(elsewhere / "env")
    python = elsewhere / "env" / "bin" / "python"
    site = Path(output(elsewhere, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # torch is not installed again
    pip = sys.executable, "-m", "pip", "--python", python
    output(elsewhere, *pip, "install", "--no-index", "--no-deps", "--no-compile", wheel)
    assert files(site / "paceline") == files(ROOT / "paceline")
    command = python.with_name("paceline")
    assert output(elsewhere, command, "--version").startswith(f"paceline {paceline.__version__}\nPython ")
    assert "the same bits" in output(elsewhere, command, "demo", "-n", "2")
    assert "No broken requirements" in output(elsewhere, *pip, "check")
