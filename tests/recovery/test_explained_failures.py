"""Errors of PyTorch that are provoked on one machine, and what the message of the run makes of them."""

import json
from pathlib import Path

import pytest
from fork_server import Command, ForkServer
from launching import Run, check_nothing_is_left, environment_in

HEAD = """
import datetime, errno, os, resource, socket, sys, time
import torch
import torch.distributed as dist

NUMBER = int(os.environ.get("PACELINE_WORKER", os.environ.get("RANK", 0)))
SECOND = datetime.timedelta(seconds=1)

def free():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]

def group(seconds=20):
    dist.init_process_group(
        "gloo", init_method=f"file://{os.getcwd()}/store", rank=NUMBER, world_size=2,
        timeout=datetime.timedelta(seconds=seconds),
    )
"""
START = """
import paceline
torch.manual_seed(0)
session = paceline.start(
    model=torch.nn.Linear(4, 1), optimizer=torch.optim.SGD, loss=torch.nn.functional.mse_loss, batch=8,
    data=torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 1)),
)
"""
INTERFACE = "dist.ProcessGroupGloo.create_device(interface='eth77')"
WAYS = {
    "Address already in use": (START, "taken = socket.create_server(('', 0))\n"
                               "dist.TCPStore('127.0.0.1', taken.getsockname()[1], 1, True)"),
    "Unable to find address for an interface": (START, INTERFACE),
    "Connection timed out": (START, "dist.TCPStore('127.0.0.1', free(), 2, False, timeout=SECOND)"),
    "Not all workers came": (START, "dist.TCPStore('127.0.0.1', free(), 2, True, timeout=SECOND)"),
    "Too many open files": (START, "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
                            "files = [open('train.py') for _ in range(40)]"),
    "Mismatch of collectives": ("", "group(); dist.all_reduce(torch.ones(4 + 4 * NUMBER))"),
    "Collective timed out": ("", "group(8)\nif NUMBER: time.sleep(60)\ndist.all_reduce(torch.ones(4))"),
    "Connection reset or closed by peer": ("", "group()\ndist.all_reduce(torch.ones(4))\nif NUMBER: os._exit(0)\n"
                                           "while True: dist.all_reduce(torch.ones(4))"),
}  # fmt: skip
SLOW = {"Connection timed out", "Not all workers came", "Collective timed out", "Too many open files"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in WAYS]
)
def test_the_message_of_a_run_explains(name: str, run: Run) -> None:
    start, what = WAYS[name]
    ran = run(HEAD + start + what, "-n", 2)
    assert ran.code != 0
    told = json.loads((ran.run / "failure.json").read_text())
    assert told["known_error"] == name, ran.report()
    lines = ran.said.splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith("What it means: ")]
    assert lines[place - 1] == told["message"], ran.said
    assert "What to do: " in lines[place]


def test_an_error_of_the_script_alone_is_not_explained(run: Run) -> None:
    ran = run(f"{HEAD}{START}socket.create_connection(('127.0.0.1', free()))", "-n", 2)
    assert "ConnectionRefusedError" in ran.said
    assert "What it means" not in ran.said
    assert json.loads((ran.run / "failure.json").read_text())["known_error"] is None


TORCHRUN = """
import sys
from torch.distributed.run import main
main([*sys.argv[1:], "train.py"])
"""


@pytest.mark.parametrize(
    "words",
    [("train.py",), pytest.param(("torchrun.py", "--standalone", "--nproc-per-node", "2"), marks=pytest.mark.slow)],
)
def test_a_worker_that_prints_its_own_error_explains_it(
    words: tuple[str, ...], fork_server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(HEAD + START + INTERFACE)
    (tmp_path / "torchrun.py").write_text(TORCHRUN)
    command = Command(words, environment_in(tmp_path), tmp_path / "out", tmp_path / "err", tmp_path)
    assert fork_server.run(command, 60.0) == 1
    said = (tmp_path / "err").read_text()
    assert said.count("paceline: What it means: the network interface") == (2 if "torchrun.py" in words else 1), said
    assert said.index("Traceback") < said.index("paceline: What it means")
    check_nothing_is_left(tmp_path)
