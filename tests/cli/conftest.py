import math
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Result

from paceline.cli.main import main

Command = Callable[..., Result]


@pytest.fixture
def paceline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a ``paceline`` command in this process, with tmp_path as the current directory.

    No line is shown because a busy machine was slow.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.cli.display.progress._LINE_SECONDS", math.inf)

    def run(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Result(code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script into tmp_path; ``rank`` and ``run`` are known in it."""

    def write(body: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(HEAD + textwrap.dedent(body))
        return path

    return write


HEAD = """\
import json, os, signal, subprocess, sys, time
from pathlib import Path
rank = int(os.environ.get("RANK", 0))
run = Path(os.environ.get("PACELINE_RUN", "."))

def fail(kind, message, consequence=False, code=1):
    report = {"rank": rank, "host": "here", "pid": os.getpid(), "type": kind, "message": message, "step": 3}
    report |= {"traceback": f"Traceback of rank {rank}", "consequence": consequence, "time": time.time()}
    (run / "errors" / f"rank-{rank}.json").write_text(json.dumps(report))
    os._exit(code)
"""
