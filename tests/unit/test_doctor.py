"""What the doctor makes of what it was told: pure functions."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.diagnostics.doctor import folders, identity, network, start
from paceline.diagnostics.doctor.checks import comparison, gpu
from paceline.diagnostics.doctor.checks.limits import check_limits
from paceline.diagnostics.doctor.checks.links import better, check_links, suspicious
from paceline.diagnostics.doctor.finding import Finding, from_json, size, to_json
from paceline.diagnostics.doctor.limits import Limits
from paceline.diagnostics.doctor.links import Link, rounds

GB = 10**9
SOUND = Limits(
    cores=4,
    all_cores=4,
    memory=64 * GB,
    available=60 * GB,
    shared_size=8 * GB,
    shared_free=8 * GB,
    files=65536,
    locked=None,
)


def wrong(findings: list[Finding]) -> list[tuple[str, str, str]]:
    assert all(one.why and one.cure for one in findings if one.status in ("warning", "failure"))
    return [(one.check, one.status, one.values) for one in findings if one.status in ("warning", "failure")]


def test_nothing_is_wrong_with_a_sound_machine() -> None:
    assert wrong(check_limits(SOUND, 4)) == []


@pytest.mark.parametrize(
    ("limits", "check", "status", "text"),
    [
        ({"files": 1000}, "open files", "warning", "1000"),
        ({"files": 100}, "open files", "failure", "100"),
        ({"processes": 50}, "processes", "failure", "50 (ulimit -u), 4 workers need 68"),
        ({"locked": 65536}, "locked memory", "warning", "65.5 kB"),
        ({"locked": 8 << 20, "rdma": ("mlx5_0",)}, "locked memory", "failure", "mlx5_0"),
        ({"shared_size": 64 << 20, "shared_free": 64 << 20}, "/dev/shm", "failure", "67.1 MB"),
        ({"shared_free": 200 << 20}, "/dev/shm", "warning", "too small"),
        ({"shared_size": None}, "/dev/shm", "failure", "not there"),
        ({"shared_writable": False}, "/dev/shm", "failure", "cannot be written"),
        ({"available": 4 * GB}, "memory", "warning", "1 GB for each of 4 workers"),
        ({"memory_limit": 2 * GB, "memory_used": GB}, "memory", "failure", "memory limit 2 GB (1 GB left)"),
        ({"quota": 1.5}, "CPU quota", "warning", "1.5 cores, and 4 are visible"),
        ({"cores": 2}, "cores", "warning", "2 of 4 for 4 workers"),
        ({"near_memory": False}, "NUMA", "warning", "may not take memory"),
    ],
)
def test_what_a_process_may_use(limits: dict[str, Any], check: str, status: str, text: str) -> None:
    ((found_check, found_status, values),) = wrong(check_limits(replace(SOUND, **limits), 4))
    assert (found_check, found_status) == (check, status)
    assert text in values


def test_many_workers_need_more_files() -> None:
    assert wrong(check_limits(replace(SOUND, files=4096, cores=256, available=512 * GB), 256)) == []
    ((check, status, values),) = wrong(check_limits(replace(SOUND, files=1024, cores=256, available=512 * GB), 256))
    assert (check, status) == ("open files", "failure")
    assert "1024 (ulimit -n), 256 workers need 1600" in values


FACTS: dict[str, Any] = {
    "versions": {"Python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "paceline": "0.1.0"},
    "torch": {
        "torch": "2.13.0+cu126",
        "CUDA": "12.6",
        "cuDNN": 91002,
        "NCCL": "2.27.3",
        "canary": "ab",
        "gpus": ["H200"],
    },
    "processor": {"model": "Xeon", "instructions": "avx2 fma"},
    "driver": "570.1",
    "script": {"path": "train.py", "hash": "12"},
    "data": {"path": "digits", "files": 3, "bytes": 3000, "hash": "34"},
    "interface": {"name": "eth0", "mtu": 9000, "speed": 25000},
    "memory": 64 * GB,
}


def unlike(key: str, **values: Any) -> dict[str, Any]:
    return {**FACTS, key: {**FACTS[key], **values}}


def test_machines_that_are_alike() -> None:
    assert wrong(comparison.compare({"h1": FACTS, "h2": FACTS, "h3": FACTS})) == []


@pytest.mark.parametrize(
    ("other", "check", "text"),
    [
        (unlike("versions", Python="3.12.1"), "Python version", "3.11.7 on h1, h3; 3.12.1 on h2"),
        (unlike("versions", numpy="1.26.0"), "NumPy version", "1.26.0 on h2"),
        (unlike("torch", torch="2.12.0+cu126"), "torch version", "2.13.0 (imported: 2.12.0+cu126) on h2"),
        (unlike("torch", CUDA="12.4"), "CUDA version", "12.4 on h2"),
        (unlike("torch", NCCL="2.21.5"), "NCCL version", "2.21.5 on h2"),
        (unlike("torch", canary="cd"), "processor canary", "ab on h1, h3; cd on h2 (processors: Xeon on h1, h2, h3)"),
        (unlike("torch", gpus=["H200", "H200"]), "GPUs", "1 x H200 on h1, h3; 2 x H200 on h2"),
        (unlike("torch", gpus=[]), "GPUs", "nothing on h2"),
        (unlike("processor", instructions="avx2 fma avx512f"), "instruction sets", "avx512f"),
        ({**FACTS, "driver": "535.2"}, "driver version", "535.2 on h2"),
        (unlike("script", hash="99"), "script", "99 on h2"),
        (unlike("script", hash=None), "script", "missing on h2 (train.py)"),
        (unlike("data", bytes=2000), "data", "2 kB"),
        (unlike("data", error="is missing"), "data", "digits is missing on h2"),
        (unlike("interface", mtu=1500), "MTU", "9000 on h1, h3; 1500 on h2"),
        ({**FACTS, "memory": 16 * GB}, "memory of the machines", "16 GB on h2"),
        ({**FACTS, "torch": {"error": "ImportError: libcudart"}}, "torch", "libcudart"),
    ],
)
def test_a_machine_that_is_not_like_the_others(other: dict[str, Any], check: str, text: str) -> None:
    found = wrong(comparison.compare({"h1": FACTS, "h2": other, "h3": FACTS}))
    assert any(name == check and text in values for name, _, values in found), found


@pytest.mark.parametrize(("offset", "status"), [(0.2, "ok"), (-3.0, "warning"), (300.0, "failure")])
def test_clocks(offset: float, status: str) -> None:
    assert comparison.clock({"h1": 0.0, "h2": offset}).status == status


FAST = Link(latency=1e-4, speed=1e9, mtu=1500)


def links(there: Link = FAST, back: Link = FAST) -> dict[tuple[str, str], Link]:
    other = {("h1", "h3"): FAST, ("h3", "h1"): FAST, ("h2", "h3"): FAST, ("h3", "h2"): FAST}
    return {("h1", "h2"): there, ("h2", "h1"): back, **other}


@pytest.mark.parametrize(
    ("there", "back", "check", "text"),
    [
        (Link(problem="no answer", firewall=True), FAST, "ports", "a firewall closes the ports"),
        (FAST, Link(problem="connection refused"), "ports", "no connection: connection refused"),
        (replace(FAST, speed=5e6), replace(FAST, speed=5e6), "link speed", "slow link: 40 Mbit/s from h1 to h2"),
        (replace(FAST, speed=5e6), FAST, "link speed", "asymmetric link: 40 Mbit/s from h1 to h2"),
        (replace(FAST, speed=1e8), replace(FAST, speed=1e8), "link speed", "slower than the other links (8000 Mbit/s)"),
        (replace(FAST, latency=0.02), replace(FAST, latency=0.02), "latency", "high latency: 20 ms"),
        (replace(FAST, loss=0.02), FAST, "packet loss", "packets are lost: 2 %"),
        (replace(FAST, speed=0.0), FAST, "large packets", "is below 1500"),
    ],
)
def test_links(there: Link, back: Link, check: str, text: str) -> None:
    ((found, _, values),) = wrong(check_links(links(there, back)))
    assert found == check
    assert text in values


def test_sound_links_and_a_second_look() -> None:
    assert wrong(check_links(links())) == []
    slow = replace(FAST, speed=1e6)
    assert suspicious(links(slow)) == [("h1", "h2")]
    assert better(slow, FAST) == better(FAST, slow) == FAST
    assert better(Link(problem="gone"), FAST) == FAST


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_every_link_is_measured_once_and_no_machine_twice_at_a_time(count: int) -> None:
    planned = rounds(count)
    pairs = [pair for one in planned for pair in one]
    assert sorted(pairs) == [(first, second) for first in range(count) for second in range(first + 1, count)]
    assert all(len({place for pair in one for place in pair}) == 2 * len(one) for one in planned)


# Printed by nvidia-smi --query-gpu=... --format=csv,noheader,nounits; ECC is off on the second one.
SMI = """NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4, 31, 0, Not Active, Not Active, Not Active, Not Active, No, Default
NVIDIA GeForce RTX 4090, 550.54.15, 24564, 17, 34, [N/A], Not Active, Not Active, Not Active, Not Active, [N/A], Default
"""


def test_sound_gpus() -> None:
    gpus = gpu.parse("WARNING: infoROM is corrupted\n" + SMI, gpu.FIELDS)
    assert [one["name"] for one in gpus] == ["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"]
    assert wrong(gpu.check_gpus(gpus, [], "")) == []
    assert [one.status for one in gpu.check_gpus([], [], "")] == ["skipped"]


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("31, 0,", "31, 7,", "GPU memory errors"),
        ("No, Default", "Yes, Default", "GPU memory errors"),
        ("0, Not Active,", "0, Active,", "GPU clocks"),
        ("No, Default", "No, Prohibited", "GPU compute mode"),
    ],
)
def test_sick_gpus(old: str, new: str, check: str) -> None:
    gpus = gpu.parse(SMI.replace(old, new, 1), gpu.FIELDS)
    assert [one[0] for one in wrong(gpu.check_gpus(gpus, [], ""))] == [check]


def test_gpus_that_cannot_be_used() -> None:
    gpus = gpu.parse(SMI, gpu.FIELDS)
    ((check, _, values),) = wrong(gpu.check_gpus(gpus, [(42, "python", 1 << 30)], ""))
    assert (check, "python (42, 1.07 GB)" in values) == ("GPU processes", True)
    assert wrong(gpu.check_gpus([], [], "couldn't communicate with the NVIDIA driver"))[0][1] == "failure"
    assert wrong([gpu.visible(8, 1, "0", "12.6", 4)])[0][1] == "failure"
    assert wrong([gpu.visible(8, 0, None, None, 4)])[0][2].endswith("(torch is built without CUDA), for 4 workers")
    assert wrong([gpu.visible(8, 2, "0,1", "12.6", 2), gpu.visible(0, 0, None, None, 2)]) == []


ETH = network.Interface("eth0", 1500, 10000)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo"}, "reached through eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, "no such interface (there are lo, docker0, eth0)"),
        ({"NCCL_SOCKET_IFNAME": "^eth"}, "reached through eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "no such interface"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, ""),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo", "GLOO_SOCKET_IFNAME": "eth0"}, ""),
    ],
)
def test_interfaces(variables: dict[str, str], text: str) -> None:
    found = network.interface_variables(variables, ETH, ["lo", "docker0", "eth0"])
    assert text in found.values
    assert (found.status == "ok") == (not text)


def test_names() -> None:
    assert network.own_name("h1", "127.0.1.1", 2).status == "warning"
    assert network.own_name("h1", "127.0.1.1", 1).status == network.own_name("h1", "10.0.0.1", 2).status == "ok"
    assert network.rendezvous_name("h1:29500", "h1", "127.0.1.1", 2).status == "failure"
    assert network.rendezvous_name("127.0.0.1:29500", "127.0.0.1", "127.0.0.1", 2).status == "ok"
    assert network.same_address("h1", {"h1": "10.0.0.1", "h2": "10.0.1.1"}).status == "warning"
    assert network.same_address("h1", {"h1": "10.0.0.1", "h2": "10.0.0.1"}).status == "ok"
    found = network.check_names("h1", {"h1": "127.0.1.1", "h2": None}, {"h1": "10.0.0.1", "h2": "10.0.0.2"})
    assert "h2 has no address, and it is at 10.0.0.2" in found.values


def test_a_shared_folder(tmp_path: Path) -> None:
    assert folders.leave_mark(tmp_path, "x", 0).check == "shared folder"
    assert folders.marks_seen(tmp_path, "x", 2) == [0]
    folders.remove_mark(tmp_path, "x", 0)
    assert not list(tmp_path.iterdir())
    assert folders.check_shared("/saved", {0: [0, 1], 1: [0, 1]}, ["h1", "h2"]).status == "ok"
    found = folders.check_shared("/saved", {0: [0], 1: [0, 1]}, ["h1", "h2"])
    assert "h1 does not see the files of h2" in found.values
    (tmp_path / "file").touch()
    assert wrong([folders.room("run directory", tmp_path / "file" / "runs")])[0][1] == "failure"


def test_data_sets(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "images").write_bytes(bytes(10_000_000))
    assert identity.data_facts(one) == identity.data_facts(two)
    (two / "images").write_bytes(bytes(5_000_000) + b"1" + bytes(4_999_999))
    assert identity.data_facts(one) != identity.data_facts(two)
    assert identity.data_facts(one / "images") != identity.data_facts(two / "images")
    assert identity.data_facts(tmp_path / "three") == {"error": "is missing"}


def test_findings_as_json() -> None:
    found = [Finding("clock", "warning", "off", "why", "cure", "h1")]
    assert from_json(json.loads(json.dumps(to_json(found)))) == found
    with pytest.raises(TypeError):
        from_json([{"check": "clock", "of another version": ""}])
    assert [size(one) for one in (999, 64 << 20, 25.3e9, 4e15)] == ["999 bytes", "67.1 MB", "25.3 GB", "4e+03 TB"]


def test_the_quick_part_at_the_start(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import paceline")
    own = start.about(script)
    assert start.differences(own, "h2", {**own, "time": time.time()}) == []
    other = {**own, "torch": "1.0\x1b[2J", "script": "0", "time": time.time() - 100}
    lines = start.differences(own, "h2", other)
    assert len(lines) == 3
    assert f"the version of torch differs: {own['torch']} on " in lines[0]
    assert ", 1.0[2J on h2" in lines[0]
    assert "the content of the script differs" in lines[1]
    assert "the clock of h2 is 100 s behind" in lines[2]
    (line,) = start.differences(own, "h2", {"torch": ["what is this"], "time": "noon"})
    assert line.startswith("the version of torch")


def test_a_difference_in_one_of_many_small_files(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for number in range(50):
            (tmp_path / folder / f"{number}").write_bytes(b"x" * 100)
    assert identity.data_facts(tmp_path / "one") == identity.data_facts(tmp_path / "two")
    (tmp_path / "two" / "7").write_bytes(b"y" * 100)
    assert identity.data_facts(tmp_path / "one") != identity.data_facts(tmp_path / "two")


def test_who_cannot_load_torch_has_no_other_processor() -> None:
    broken = {**FACTS, "torch": {"error": "ImportError: libcudnn.so.9"}}
    found = [one for one in comparison.compare({"h1": FACTS, "h2": broken}) if one.status in ("failure", "warning")]
    assert [(one.check, one.place) for one in found] == [("torch", "h2")]
