"""No value of a setting, an option or a plan file ends in a traceback, waits, or starts what was not meant."""

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import flat_keys, quoted, read_plan, resolve
from paceline.environments import env
from paceline.errors import ConfigError, PacelineError
from paceline.settings import Settings
from paceline.system.masking import mask
from paceline.system.number_kinds import LONGEST_SECONDS

Paceline = Callable[..., Any]
COUNT = 1000
LARGE = 2**63


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


ITSELF: list[object] = []
ITSELF.append(ITSELF)
VALUES: list[object] = [
    *(True, False, None, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**5000, -(10**5000)),
    *(0.0, -0.0, 1e-300, 5e-324, 1e300, math.inf, -math.inf, math.nan, 0.5, 1.5),
    *("", " ", "none", "nan", "inf", "-inf", "1e400", "0x10", "1_0", "9" * 5000, "\0", "a\0b", "\ud800", "é" * 300),
    *(
        "[" * 50_000,
        "{" * 50_000,
        '"' * 3,
        "x" * 100_000,
        "../..",
        "/dev/zero",
        "a://b\0",
        "://",
        "\n",
        "1;2",
        "1,2,,3",
    ),
    *([], [[]], [1, "a", None], {}, {"a": 1}, {1: 2}, (), set(), object(), Unshowable(), ITSELF, b"\xff", 1j, len, int),
]


def hostile(random_: random.Random) -> object:
    value = random_.choice(VALUES)
    if random_.random() < 0.3:
        value = random_.choice(
            [[value], {"x": value}, str, "".join(chr(random_.randrange(1, 0x11000)) for _ in "12345")]
        )
    return value


def numbers(value: object) -> list[float]:
    if isinstance(value, dict | tuple):
        return [number for part in (value.values() if isinstance(value, dict) else value) for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


def check(settings: Settings) -> None:
    found = numbers(settings.model_dump())
    assert all(not math.isnan(number) and (isinstance(number, float) or 0 <= number < LARGE) for number in found)
    assert 0.1 <= settings.timeout_seconds <= LONGEST_SECONDS
    assert (settings.threads or 1) <= 1024
    assert settings.workers_per_loader <= 256


def test_settings() -> None:
    random_ = random.Random(0)
    keys, refused = list(flat_keys()), 0
    for _ in range(COUNT):
        key, value = random_.choice(keys), hostile(random_)
        head, _, tail = key.partition(".")
        text = value if isinstance(value, str) else repr(3)
        for layers in (({head: {tail: value} if tail else value},), ({}, {}, {}, {key: text})):
            try:
                check(resolve(*layers).settings)  # type: ignore[arg-type]
            except ConfigError as error:
                refused += 1
                assert len(str(error)) < 2000
                assert key in str(error) or head in str(error)
    assert refused > COUNT / 4


def test_plan_files(tmp_path: Path) -> None:
    random_ = random.Random(1)
    good = b'batch = 64\nexact = true\n[checkpoint]\nevery = 10\n[pipeline]\ncut = ["3", "5"]\n'
    plan = tmp_path / "plan.toml"
    texts = [b"a=" + b"[" * 50_000, b"batch=" + b"9" * 5000, b"\xff\xfe", b"x" * (2 << 20), b"a.b.c.d=1\n" * 3, b"\0"]
    for _ in range(COUNT // 3):
        text = bytearray(good)
        for _ in range(random_.randrange(1, 6)):
            text[random_.randrange(len(text))] = random_.randrange(256)
        texts.append(bytes(text))
    for text in texts:
        plan.write_bytes(text)
        try:
            check(resolve({}, read_plan(plan)).settings)
        except ConfigError as error:
            assert len(str(error)) < 20_000


def test_a_plan_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.toml")
    for path in (tmp_path / "plan.toml", tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is not a file"):
            read_plan(path)
    for path in (tmp_path / "a\0b", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match="plan file"):
            read_plan(path)


DIGITS = "9" * 20
OPTIONS = [
    ("-n", "0"),
    ("-n", "-1"),
    ("-n", DIGITS),
    ("-n", "9" * 5000),
    ("-n", "1.5"),
    ("-n", "513"),
    ("-n", "500", "--standby", "100"),
    ("--standby", "-1"),
    ("--standby", DIGITS),
    ("--port", "70000"),
    ("--port", "-1"),
    ("--port", DIGITS),
    ("--patience", "nan"),
    ("--patience", "inf"),
    ("--patience", "-1"),
    ("--grace", "-3"),
    ("--grace", "nan"),
    ("--grace", "1e300"),
    ("--elastic", "1:" + DIGITS),
    ("--elastic", "9" * 5000 + ":1"),
    ("--elastic", "1:99999999"),
    ("--elastic", ":"),
    ("--elastic", "-1:2"),
    ("--nodes", "1:" + DIGITS, "--rendezvous", "127.0.0.1:29500"),
    ("--nodes", "1", "--rendezvous", "127.0.0.1:" + "9" * 5000),
    ("--nodes", "1", "--rendezvous", "127.0.0.1:70000"),
    ("--nodes", "1", "--rendezvous", "x" * 300 + ":1"),
    ("--nodes", "2", "--rendezvous", "127.0.0.1:29534", "--set", "strategy=hogwild"),
    ("--name", "x" * 300),
    ("--name", "x" * 300, "--resume", "auto"),
    ("--name", "a\nb"),
    ("--name", ".."),
    ("--name", "\udcff" * 10),
    ("--set", "=" * 100_000),
    ("--set", "x" * 100_000),
    ("--set", "threads=100000"),
    ("--set", "timeout_seconds=inf"),
    ("--plan", "x" * 300),
]


OTHER_COMMANDS = [
    ("verify", "--workers", "1," + DIGITS),
    ("verify", "--workers", "9" * 5000),
    ("verify", "--steps", "-1"),
    ("profile", "-n", DIGITS),
    ("profile", "--stages", "0"),
    ("profile", "--memory", "nan"),
    ("profile", "--memory", "-1"),
]


@pytest.mark.parametrize("given", OTHER_COMMANDS, ids=lambda given: " ".join(given)[:40])
def test_options_of_other_commands(paceline: Paceline, tmp_path: Path, given: tuple[str, ...]) -> None:
    command, *options = given
    script = tmp_path / "train.py"
    script.write_text("open('started', 'w')")
    result = paceline(command, *options, script)
    assert result.code == 2, result
    assert result.err.startswith("paceline: ")
    assert len(result.err) < 2000
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda given: " ".join(given)[:40].encode("ascii", "replace").decode())
def test_options(paceline: Paceline, tmp_path: Path, options: tuple[str, ...]) -> None:
    script = tmp_path / "train.py"
    script.write_text("open('started', 'w')")
    result = paceline("run", *options, script)
    assert result.code in (2, 3), result
    assert "Traceback" not in result.err
    assert 0 < len(result.err) < 12_000
    assert not (tmp_path / "started").exists()


def test_a_script_with_a_name_that_is_too_long(paceline: Paceline) -> None:
    result = paceline("run", "x" * 300)
    assert result.code == 2
    assert result.err.startswith("paceline: ")


def test_a_name_that_is_not_unicode(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline.cli.main", "run", b"\xff.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert "There is no script" in ended.stderr


def test_a_script_that_is_no_file_is_not_waited_for(paceline: Paceline, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.py")
    result = paceline("run", "train.py")
    assert (result.code, result.err) == (2, "paceline: train.py is not a file.\n")


def test_a_long_name_of_a_script(paceline: Paceline, tmp_path: Path) -> None:
    script = tmp_path / ("x" * 250 + ".py")
    script.write_text("print('trained')")
    assert paceline("run", script).code == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert len(run.name) < 255


@pytest.mark.parametrize("size", ["9" * 20, "9" * 5000, "1e9", "100000"])
def test_the_world_of_another_launcher(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(PacelineError, match="WORLD_SIZE"):
        env.identity()


def test_values_are_quoted_in_short() -> None:
    assert quoted("a") == "'a'"
    assert quoted("x" * 1000) == "'" + "x" * 75 + "...'"
    assert quoted(10**5000) == "<int>"
    assert quoted(Unshowable()) == "<Unshowable>"


def test_secrets_are_masked() -> None:
    words = ["--lr", "0.1", "--api-key", "f00", "HF_TOKEN=f00", "--password=f00", "sftp://me:f00@host/data"]
    words += ["--max-tokens", "512", "--verbose-token", "--lr", "https://h/x?sig=f00&part=1", "hf_f00f00f00f00f00f00"]
    masked = ["--lr", "0.1", "--api-key", "***", "HF_TOKEN=***", "--password=***", "sftp://***@host/data"]
    masked += ["--max-tokens", "512", "--verbose-token", "--lr", "https://h/x?sig=***&part=1", "***"]
    assert mask(words) == masked


def test_records_hold_no_secret(paceline: Paceline, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; assert sys.argv[2] == 'f00bar'")
    assert (
        paceline("run", "--name", "run", "--set", "checkpoint=sftp://me:f00bar@h/c", script, "--token", "f00bar").code
        == 0
    )
    texts = [path.read_text() for path in (tmp_path / "runs" / "run").rglob("*") if path.is_file()]
    assert texts and not any("f00bar" in text for text in texts)
