from collections.abc import Callable
from pathlib import Path
from typing import Any

Script = Callable[..., Path]
Paceline = Callable[..., Any]

STARTS = """
answer = Path(os.environ["PACELINE_SHOW_CONFIG"])
print("noise of the script")
settings = {"batch": int(json.loads(os.environ["PACELINE_SET"])["batch"]), "exact": True, "clip_norm": None}
sources = {"batch": "command line", "exact": "script", "clip_norm": "default"}
answer.write_text(json.dumps({"settings": settings, "sources": sources}))
sys.exit(0)
"""


def test_each_setting_with_its_source(paceline: Paceline, script: Script) -> None:
    result = paceline("config", "--set", "batch=64", script(STARTS), "--set", "mine")
    assert result.code == 0
    assert result.out.splitlines() == [
        "setting    value  from          what it is",
        "batch      64     command line  samples per step over all workers",
        "exact      true   script        the same bits for any number of workers; fixed-point: by sums of whole "
        "numbers",
        "clip_norm  none   default       clip the mean gradient to this norm over all parameters",
    ]


def test_a_script_that_never_starts(paceline: Paceline, script: Script) -> None:
    result = paceline("config", script("print('hello')"))
    assert result.code == 1
    assert "ended without calling paceline.start" in result.err
    assert "hello" in result.err


def test_a_script_that_fails(paceline: Paceline, script: Script) -> None:
    result = paceline("config", script("sys.exit('no data here')"))
    assert result.code == 1
    assert "no data here" in result.err
    assert "failed before paceline.start" in result.err


def test_wrong_settings(paceline: Paceline, script: Script) -> None:
    assert paceline("config", "--set", "x=1", script("")).code == 2
    assert paceline("config", "nowhere.py").code == 2
