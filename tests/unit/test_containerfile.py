"""The Containerfile, as far as that shows without building it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = [line for line in (ROOT / "Containerfile").read_text().replace("\\\n", " ").splitlines() if line[:1].isalpha()]


def of(kind: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{kind} ")]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    sources = [word for copied in of("COPY") if "--from" not in copied for word in shlex.split(copied)[:-1]]
    taken = [line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")]
    assert set(sources) == set(taken)
    assert all((ROOT / source).exists() for source in sources)


def test_a_user_without_rights_runs_the_demo() -> None:
    (user,) = of("USER")
    assert user.partition(":")[0].isdecimal() and int(user.partition(":")[0]) > 0
    assert LINES.index(f"USER {user}") > LINES.index([line for line in LINES if line.startswith("FROM ")][-1])
    assert json.loads(of("CMD")[-1]) == ["paceline", "demo"]
