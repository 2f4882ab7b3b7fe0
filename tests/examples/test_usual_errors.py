"""The tutorial of ten errors: each command of the page prints the lines that the page shows."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import PACELINE, Command, ForkServer

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "tutorials" / "usual_errors.py"
PAGE = (ROOT / "docs" / "tutorials" / "usual-errors.md").read_text(encoding="utf-8")
PORT = "29555"  # on the page; each test has its own
RESET = re.compile(r"Read error (\S+): Connection reset by peer")  # what gloo says in place of "closed", by chance
SECTIONS = dict(re.findall(r"^## \d+\. (\w+)\n(.+?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL))


def blocks(kind: str, text: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.+?)\n```", text, re.MULTILINE | re.DOTALL)


def printed(name: str, plain: bool, server: ForkServer, folder: Path) -> str:
    """Run a section's command of plain PyTorch or of Paceline. Without its own, it has those above all sections."""
    own = blocks("sh", SECTIONS[name])
    listening = socket.create_server(("127.0.0.1", 0))
    port = str(listening.getsockname()[1])
    if name != "port":
        listening.close()
    text = own[0] if own else blocks("sh", PAGE)[0].replace("killed", name)
    lines = [shlex.split(line) for line in text.replace(PORT, port).splitlines()]
    exported = dict(word.split("=") for line in lines if line[0] == "export" for word in line[1:])
    ((program, *words),) = (line for line in lines if SCRIPT.name in line and ("--ddp" in line) == plain)
    words = [str(SCRIPT) if word == SCRIPT.name else word for word in words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **exported}
    out = folder / "out"
    if program == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        with out.open("wb") as file:
            subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=file, check=False, timeout=120)
    else:
        start = PACELINE if program == "paceline" else ()
        server.run(Command((*start, *words), environment, out, folder / "err", folder), 120)
        out.write_text(out.read_text() + (folder / "err").read_text())
    listening.close()
    return RESET.sub(r"Connection closed by peer \1", out.read_text().replace(port, PORT))


def assert_shown(shown: str, output: str) -> None:
    """Assert that the output has each line of the page. Numbers may differ, but not those of the script's lines."""
    for line in shown.splitlines():
        pattern = re.escape(line).replace(r"\.\.\.", ".*")
        pattern = re.sub(r"\w+\\\.py:\d+|\d+", lambda found: found[0] if ".py" in found[0] else r"\d+", pattern)
        assert re.search(f"^{pattern}", output, re.MULTILINE), f"{line}\n\n{output}"


def test_there_are_ten() -> None:
    assert len(SECTIONS) == 10


@pytest.mark.sampled(1, turns=5)
@pytest.mark.parametrize("name", ["killed", *(name for name in SECTIONS if name != "killed")])
def test_what_paceline_prints(name: str, fork_server: ForkServer, tmp_path: Path) -> None:
    assert_shown(blocks("text", SECTIONS[name])[1], printed(name, False, fork_server, tmp_path))


@pytest.mark.slow(turns=10)
@pytest.mark.parametrize("name", SECTIONS)
def test_what_pytorch_prints(name: str, fork_server: ForkServer, tmp_path: Path) -> None:
    assert_shown(blocks("text", SECTIONS[name])[0], printed(name, True, fork_server, tmp_path))
