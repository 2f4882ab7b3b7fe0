"""Faults made on purpose, on one machine and between two: each is found, and has its name."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_hosts import PORT, Doctor, TwoHosts, doctor, ended, missing

OF_THIS_MACHINE = {"memory", "cores", "CPU quota", "locked memory", "/dev/shm", "open files", "GPU processes"}
"""What may be wrong with the machine that runs the tests."""
ROOM = "run directory", "temporary files"
SMI = """#!/bin/sh
case "$1" in
*memory.total*)
  echo 'NVIDIA H200, 570.1, 143771, 512, 41, 0, Not Active, Not Active, Not Active, Not Active, No, Default'
  echo 'NVIDIA H200, 570.1, 143771, 512, 91, 3, Active, Active, Not Active, Not Active, No, Default';;
*) echo '4242, python, 1024';;
esac
"""
needs_root = pytest.mark.skipif(missing() is not None, reason=str(missing()))
needs_firewall = pytest.mark.skipif(missing("nft") is not None, reason=str(missing("nft")))
needs_shaping = pytest.mark.skipif(missing("tc") is not None, reason=str(missing("tc")))
OTHER_PYTHON = """
import platform, time
platform.python_version = lambda: "3.10.1"
now = time.time
time.time = lambda: now() - 300
"""


@contextlib.contextmanager
def limited(cores: float, memory: int) -> Iterator[str]:
    """Lines of shell that enter a control group; empty where none can be made."""
    root, name = Path("/sys/fs/cgroup"), f"paceline-doctor-{os.getpid()}"
    period = 100_000
    values = {"cpu.max": f"{int(cores * period)} {period}", "memory.max": f"{memory}"}
    folders = [root / name]
    if not (root / "cgroup.controllers").exists():
        folders = [root / "cpu" / name, root / "memory" / name]
        values = {"cpu.cfs_quota_us": f"{int(cores * period)}", "memory.limit_in_bytes": f"{memory}"}
    try:
        for folder in folders:
            folder.mkdir()
        for file, value in values.items():
            next(one / file for one in folders if (one / file).exists()).write_text(value)
    except (OSError, StopIteration):
        yield ""
    else:
        yield "\n".join(f"echo $$ > {folder}/cgroup.procs" for folder in folders)
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Doctor:
    """One machine on which everything is wrong."""
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("sick")
    tools = folder / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(SMI)
    (tools / "nvidia-smi").chmod(0o755)
    with limited((os.cpu_count() or 1) - 0.5, 1_500_000_000) as enter:
        setup = f"""
        {enter}
        mkdir full fixed
        mount -t tmpfs -o size=64m tmpfs /dev/shm
        mount -t tmpfs -o size=1m tmpfs full
        head -c 2000000 /dev/zero > full/zeros || true
        mount -t tmpfs -o ro tmpfs fixed
        ulimit -n 200
        ulimit -l 64
        """
        options = ["-n", "2", "--runs-dir", "full/runs", "--checkpoints", "fixed", "--data", "no-data", "no.py"]
        path = f"{tools}:{os.environ['PATH']}"
        found = ended(doctor(folder, *options, setup=setup, PATH=path))
    assert found.code == 1, found.said
    if not enter:
        found.findings += [{"check": check, "status": "skipped"} for check in ("CPU quota", "memory")]
    return found


@pytest.mark.parametrize(
    ("check", "text"),
    [
        ("open files", "failure: too few file descriptors: a process may open 200"),
        ("locked memory", "warning: too little locked memory: 65.5 kB"),
        ("/dev/shm", "failure: too small: 67.1 MB free of 67.1 MB"),
        ("run directory", "is full"),
        ("shared folder", "fixed cannot be written: Read-only file system"),
        ("CPU quota", "warning: the control group gives the time of"),
        ("memory", "memory limit 1.5 GB"),
        ("script", "failure: the script is missing"),
        ("data", "failure: the data set no-data is missing"),
        ("GPU memory errors", "failure: uncorrected ECC errors: GPU 1: 3"),
        ("GPU clocks", "throttled: GPU 1 at 91 °C: hw_slowdown, hw_thermal_slowdown"),
        ("GPU processes", "python (4242, 1.07 GB)"),
        ("visible GPUs", "hidden GPUs: torch sees 0 of 2 GPUs"),
    ],
)
def test_one_machine(sick: Doctor, check: str, text: str) -> None:
    if any(one == {"check": check, "status": "skipped"} for one in sick.findings):
        pytest.skip("no control group can be made here")
    assert text in sick.found(check), sick.findings


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    if reason := missing():
        pytest.skip(reason)
    hosts = TwoHosts(tmp_path_factory.mktemp("hosts"))
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()


@pytest.fixture
def hosts(network: TwoHosts) -> Iterator[TwoHosts]:
    yield network
    network.heal()


def test_nothing_is_wrong(hosts: TwoHosts, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import paceline\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one").write_text("1")
    options = "--data", str(tmp_path / "data"), "--checkpoints", str(tmp_path / "shared"), str(script)
    found = hosts.both(*options, torch=True)
    assert found.wrong() <= OF_THIS_MACHINE, found.findings
    assert found.code == 0 or found.wrong()
    assert not list((tmp_path / "shared").iterdir())


@pytest.fixture(scope="module")
def unlike(network: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doctor]:
    """Two machines that differ in everything."""
    folder = tmp_path_factory.mktemp("unlike")
    other = folder / "other"
    for name in ("torch-2.0.0.dist-info", "numpy-1.0.0.dist-info"):
        (other / name).mkdir(parents=True)
        library, _, version = name.removesuffix(".dist-info").partition("-")
        (other / name / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: {version}\n")
    (other / "sitecustomize.py").write_text(OTHER_PYTHON)
    for name in ("h1", "h2"):
        (network.folder / name).mkdir(exist_ok=True)
        (network.folder / name / "train.py").write_text(f"# {name}")
        (network.folder / name / "data").write_text(f"of {name}")
    shared = folder / "shared"
    shared.mkdir()
    options = ["--checkpoints", str(shared), "--data", "data", "train.py"]
    network.names("h2", h2="127.0.1.1")
    network.run("h2", "ip", "link", "set", "eth0", "mtu", "1400")
    try:
        first = network.start("h1", *options, torch=True)
        variables = {"PYTHONPATH": str(other), "ATEN_CPU_CAPABILITY": "default", "GLOO_SOCKET_IFNAME": "lo"}
        second = network.start("h2", *options, setup=f"mount -t tmpfs tmpfs {shared}", torch=True, **variables)
        found = ended(first)
        assert ended(second).code == found.code == 1, found.said
        yield found
    finally:
        network.heal()


@needs_root
def test_a_folder_for_checkpoints_without_room(hosts: TwoHosts, tmp_path: Path) -> None:
    small = f"mount -t tmpfs -o size=30m tmpfs {tmp_path}"
    first, second = (hosts.start(name, "--checkpoints", str(tmp_path), setup=small) for name in ("h1", "h2"))
    found = ended(first)
    ended(second)
    assert "disk almost full" in found.found("room for checkpoints", "h2"), found.findings
    assert found.code == 1


PYTHON = ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("check", "text"),
    [
        ("Python version", f"Python version differs: {PYTHON} on h1; 3.10.1 on h2"),
        ("torch version", "2.0.0 (imported: 2."),
        ("NumPy version", "NumPy version differs"),
        ("clock", "h2 is 300.0 s behind"),
        ("processor canary", "the same computation gives different bits"),
        ("instruction sets", "processors differ"),
        ("script", "the content of the script differs"),
        ("data", "the data set differs: 1 files, 5 bytes, hash"),
        ("shared folder", "h1 does not see the files of h2; h2 does not see the files of h1"),
        ("network interface", "GLOO_SOCKET_IFNAME=lo, and the other machines are reached through eth0"),
        ("own name", "the machine's own name h2 resolves to 127.0.1.1"),
        ("MTU", "MTU differs: 1500 on h1; 1400 on h2"),
    ],
)
def test_machines_that_differ(unlike: Doctor, check: str, text: str) -> None:
    assert text in unlike.found(check), unlike.findings


ESTABLISHED = "ct state established,related accept"


@needs_firewall
@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("drop", "no answer: a firewall drops the packets"),
        ("reject", "connection rejected by a firewall"),
        ("reject with tcp reset", "a firewall resets it"),
    ],
)
def test_a_firewall_closes_the_ports_of_workers(hosts: TwoHosts, rule: str, text: str) -> None:
    hosts.firewall("h2", ESTABLISHED, f"tcp dport 1024-65535 {rule}")
    found = hosts.both()
    assert text in found.found("ports", "h1 -> h2"), found.findings
    assert not found.found("ports", "h2 -> h1")
    assert found.code == 1


@needs_shaping
def test_a_slow_link(hosts: TwoHosts) -> None:
    hosts.shape("h1", "20mbit")
    hosts.shape("h2", "20mbit")
    found = hosts.both()
    assert "warning: slow link: " in found.found("link speed", "h1 - h2"), found.findings


@needs_shaping
def test_an_asymmetric_link(hosts: TwoHosts) -> None:
    hosts.shape("h2", "20mbit")
    found = hosts.both()
    assert "warning: asymmetric link: " in found.found("link speed", "h1 - h2"), found.findings


@needs_firewall
def test_lost_packets(hosts: TwoHosts) -> None:
    hosts.firewall("h2", "tcp dport 1024-65535 numgen inc mod 20 0 drop")
    found = hosts.both()
    assert "packets are lost" in found.found("packet loss", "h1 -> h2"), found.findings


@needs_firewall
def test_large_packets_that_do_not_pass(hosts: TwoHosts) -> None:
    hosts.firewall("h2", "ip length > 1300 drop", hook="output")
    found = hosts.both()
    assert "small messages pass and large ones do not" in found.found("large packets", "h1 - h2"), found.findings


@needs_firewall
@pytest.mark.parametrize(
    ("rule", "text"),
    [("drop", "no answer: a firewall drops the packets"), ("reject", "connection rejected by a firewall")],
)
def test_a_firewall_before_the_rendezvous(hosts: TwoHosts, rule: str, text: str) -> None:
    hosts.firewall("h1", f"tcp dport {PORT} {rule}")
    first, second = hosts.start("h1", patience=8.0), hosts.start("h2", patience=0.0)
    alone = ended(second)
    assert f"port {PORT} of h1" in alone.found("rendezvous port", "h2"), alone.findings
    assert text in alone.found("rendezvous port", "h2")
    waiting = ended(first)
    assert "1 of 2 machines came within 8 s: h1" in waiting.found("machines")
    assert (alone.code, waiting.code) == (1, 1)


@needs_root
def test_a_port_at_which_nobody_listens(hosts: TwoHosts) -> None:
    found = ended(hosts.start("h2", patience=0.0))
    assert "no program listens on this port" in found.found("rendezvous port", "h2"), found.findings


@needs_root
def test_an_address_that_no_machine_has(hosts: TwoHosts) -> None:
    hosts.names("h2", h1=f"{hosts.net}.99")
    found = ended(hosts.start("h2", patience=0.0))
    assert "no machine answers at this address" in found.found("rendezvous port", "h2"), found.findings


@needs_root
@pytest.mark.parametrize("where", ["h1", "h2"])
def test_a_name_that_is_loopback(hosts: TwoHosts, where: str) -> None:
    hosts.names(where, h1="127.0.1.1")
    found = ended(hosts.start(where))
    assert "wrong name resolution: h1 resolves to 127.0.1.1" in found.found("rendezvous name"), found.findings
    assert found.code == 1


@needs_root
def test_a_name_without_an_address(hosts: TwoHosts) -> None:
    hosts.names("h2", h1="")
    found = ended(hosts.start("h2"))
    assert "the name 'h1' has no address" in found.found("rendezvous name", "h2"), found.findings


@needs_root
def test_a_port_that_another_program_has(hosts: TwoHosts) -> None:
    listens = f"import socket, time; one = socket.create_server(('{hosts.net}.1', {PORT})); print(); time.sleep(600)"
    command = ["ip", "netns", "exec", hosts.spaces["h1"], sys.executable, "-uc", listens]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        try:
            found = ended(hosts.start("h1"))
        finally:
            program.kill()
    assert f"port {PORT} is in use here: " in found.found("rendezvous port"), found.findings


@needs_root
def test_another_secret(hosts: TwoHosts, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text(32 * "y")
    absent = ended(hosts.start("h2", "--secret-file", str(tmp_path / "none"), patience=0.0))
    assert "there is no secret file" in absent.found("secret"), absent.findings
    first = hosts.start("h1", patience=20.0)
    found = ended(hosts.start("h2", "--secret-file", str(other), patience=20.0))
    assert "does not accept the secret of this machine" in found.found("secret"), found.findings
    assert "1 of 2 machines came" in ended(first).found("machines")
