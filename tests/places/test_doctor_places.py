"""The doctor on machines that a place gives: each is examined, and the first one reports."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, missing
from slurm_cluster import SlurmCluster
from test_doctor_faults import OF_THIS_MACHINE
from two_hosts import missing as missing_command

PACELINE = str(Path(sys.executable).with_name("paceline"))
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts."""
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True) as folder:
        made = Hosts(Path(folder), 3)
        try:
            made.up()
            yield made
        finally:
            made.down()


def findings(said: str) -> list[dict[str, Any]]:
    """Of --json, between lines on standard error."""
    assert "\n{" in f"\n{said}", said
    whole, _ = json.JSONDecoder().raw_decode(said[f"\n{said}".index("\n{") :])
    found: list[dict[str, Any]] = whole["findings"]
    return found


def wrong(said: str) -> dict[str, str]:
    return {
        f"{one['place']} {one['check']}".strip(): one["values"]
        for one in findings(said)
        if one["status"] in ("warning", "failure") and one["check"] not in OF_THIS_MACHINE
    }


def on_hosts(hosts: Hosts, folder: Path, *words: str) -> tuple[int, str]:
    process = hosts.start("sw", PACELINE, "doctor", "--json", *words, cwd=folder)
    said, _ = process.communicate(timeout=250)
    hosts.await_end()
    return process.returncode, said


def test_hosts_of_ssh_that_are_sound(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import paceline\n")
    (tmp_path / "data").write_text("1")
    options = ("--checkpoints", "shared", "--data", "data", "train.py")
    code, said = on_hosts(hosts, tmp_path, "-H", "h1:1,h2:1,h3:1", *options)
    assert wrong(said) == {}, said
    assert {one["place"] for one in findings(said)} >= {"h1", "h2", "h3", "h1 - h2", "h1 - h3", "h2 - h3"}
    assert code == any(one["status"] == "failure" for one in findings(said))


def test_hosts_of_ssh_that_lack_something(hosts: Hosts, tmp_path: Path) -> None:
    code, said = on_hosts(hosts, tmp_path, "-H", "h1:1,h2:1", "no.py")
    assert "missing on h1 (no.py), h2 (no.py)" in wrong(said)["script"]
    assert code == 1
    code, said = on_hosts(hosts, tmp_path, "-H", "h1:1,nowhere:1", "no.py")
    assert "nowhere: there is no host of this name" in wrong(said)["start"]
    assert code == 1


@pytest.mark.skipif(missing_command("nft") is not None, reason=str(missing_command("nft")))
@pytest.mark.parametrize(
    ("rule", "text"),
    [("drop", "no answer: a firewall drops the packets"), ("reject", "connection rejected by a firewall")],
)
def test_a_host_of_ssh_that_the_others_do_not_reach(hosts: Hosts, tmp_path: Path, rule: str, text: str) -> None:
    rules = "table inet test { chain one { type filter hook input priority 0; iif lo accept; tcp dport 22 accept; "
    rules += f"ct state established,related accept; meta l4proto tcp {rule}; }}\n}}\n"
    first = ["ip", "netns", "exec", hosts.namespace("h1"), "nft"]
    subprocess.run([*first, "-f", "-"], input=rules, text=True, check=True)
    try:
        code, said = on_hosts(hosts, tmp_path, "-H", "h1:1,h2:1", "--patience", "15")
    finally:
        subprocess.run([*first, "flush", "ruleset"], check=True)
    assert "1 of 2 machines came within 15 s: h1" in wrong(said)["machines"]
    assert f"of 10.77.0.1 cannot be reached: {text}" in said, said
    assert code == 1


def test_nodes_of_slurm(slurm: SlurmCluster, tmp_path: Path) -> None:
    process = slurm.start("salloc", "-N", "2", PACELINE, "doctor", "--json", "no.py", cwd=tmp_path)
    said, _ = process.communicate(timeout=250)
    lines = [line.removeprefix("[n2] ") for line in said.splitlines()]  # both have one address, and either may be first
    text = "\n".join(line for line in lines if not line.startswith(("salloc:", "srun:")))
    assert set(wrong(text)) == {"script"}, said
    assert len([one for one in findings(text) if one["check"] == "open files"]) == 2
    assert process.returncode == 1


@pytest.mark.parametrize("program", ["mpiexec.openmpi", "mpiexec.hydra"])
def test_hosts_of_mpi(program: str, tmp_path: Path) -> None:
    if (found := shutil.which(program)) is None:
        pytest.skip(f"needs {program}: apt-get install openmpi-bin mpich")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "mpiexec").write_text(f'#!/bin/sh\nexec {found} "$@"\n')
    (tools / "mpiexec").chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    clean["PATH"] = f"{tools}:{clean['PATH']}"
    command = [PACELINE, "doctor", "--on", "mpi", "-H", "localhost:2,127.0.0.1:1", "--json", "no.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=250
    )
    assert set(wrong(ended.stdout)) == {"script"}, ended
    assert len([one for one in findings(ended.stdout) if one["check"] == "open files"]) == 2
    assert ended.returncode == 1
