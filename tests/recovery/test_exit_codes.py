"""The exit code of a run is that of its script, or a documented one.

Ways to end x where in the script x who x how it is started. A diagonal runs always, another one is slow; all of them
run with ``EXIT_CODES=all`` in the environment (half an hour).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from fork_server import PACELINE, Command, ForkServer
from launching import check_nothing_is_left, environment_in

from paceline.launchers.machine import choose_port

TRAIN = """
import atexit, os, signal, sys, threading

ALL = WHO == "all"

def mine(rank):
    '''For one: whoever comes first, but not rank 0; who replaces it does not do it again.'''
    if ALL:
        return True
    try:
        return rank > 0 and open("did", "x") is not None
    except FileExistsError:
        return False

NUMBER = int(os.environ.get("PACELINE_WORKER", os.environ.get("RANK", 0)))

class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")
    __repr__ = __str__

class Base(BaseException):
    pass

# first
import torch
import paceline

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        # data
        return torch.full((4,), index / 64), torch.tensor([index / 64])

def optimizer(parameters):
    # during
    return torch.optim.SGD(parameters, lr=0.1)

torch.manual_seed(0)
# before
session = paceline.start(
    model=torch.nn.Linear(4, 1), optimizer=optimizer, loss=torch.nn.functional.mse_loss, data=Data(), batch=8,
    timeout_seconds=30, workers_per_loader=LOADERS,
)
NUMBER = session.rank
for batch in session.batches(steps=6):
    if batch.step == 3:
        pass
        # middle
    session.step(batch)
NUMBER = session.rank
# after
"""
WAYS = {
    "exit-1": "sys.exit(1)",
    "exit-3": "sys.exit(3)",
    "exit-text": "sys.exit('a text')",
    "exit-true": "sys.exit(True)",
    "exit-0": "sys.exit()",
    "os-exit-3": "os._exit(3)",
    "os-exit-0": "os._exit(0)",
    "thread-exit": "one = threading.Thread(target=sys.exit, args=(3,)); one.start(); one.join()",
    "thread-os-exit": "threading.Thread(target=os._exit, args=(3,)).start(); signal.pause()",
    "atexit": "atexit.register(lambda: 1 / 0)",
    "exception": "raise ValueError('bad')",
    "unspeakable": "raise Unspeakable",
    "base-exception": "raise Base('bad')",
    "memory": "raise MemoryError",
    "import": "import no_such_module",
    "syntax": "exec('if')",
    "keyboard": "raise KeyboardInterrupt",
    "SIGINT": "os.kill(os.getpid(), signal.SIGINT)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV": "os.kill(os.getpid(), signal.SIGSEGV)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
}
PLACES = "after", "middle", "before", "during", "first", "data", "loader"
STARTS = {
    "three": ("-n", "3"),
    "elastic": ("-n", "3", "--elastic", "1:3"),
    "one": ("-n", "1"),
    "machines": ("-n", "1", "--nodes", "2"),
    "python": (),
    "standby": ("-n", "2", "--standby", "1"),
    "torchrun": ("--standalone", "--nproc-per-node", "2"),
}
INTERRUPTED = 128 + signal.SIGINT
BEFORE = "first", "before"
"""``paceline.start``."""


class Case(NamedTuple):
    way: str
    place: str
    who: str  # "all" or "one"
    start: str

    @property
    def exists(self) -> bool:
        alone = self.start in ("python", "one")
        in_data = self.place in ("data", "loader")
        replaced = self.start in ("elastic", "standby", "machines") and self.who == "all"
        forever = replaced and self.way in ("SIGKILL", "SIGSEGV", "os-exit-3", "thread-os-exit", "keyboard", "SIGINT")
        main_thread = self.way in ("thread-os-exit", "atexit", "SIGTERM", "SIGINT")
        return (
            not (alone and self.who == "one") and not (in_data and (self.who == "one" or main_thread)) and not forever
        )


def expected(case: Case) -> int:
    """What the run ends with; of torchrun 1 for any failure."""
    code = _of_worker(case)
    if case.start == "torchrun":
        return int(code != 0)
    if case.start == "python":
        return {5: -signal.SIGKILL, 139: -signal.SIGSEGV, INTERRUPTED: -signal.SIGINT}.get(code, code)
    return code


def _of_worker(case: Case) -> int:
    way, place, who, start = case
    replaces = start in ("elastic", "standby", "machines") and who == "one"
    lost = replaces and place not in (*BEFORE, "during")  # the model is built before the workers meet
    interrupted = 0 if replaces and place in BEFORE else INTERRUPTED
    early = 0 if who == "all" or place == "after" else 1
    codes = {
        **dict.fromkeys(("thread-exit", "atexit"), 0),
        **dict.fromkeys(("exit-0", "os-exit-0"), early),
        **dict.fromkeys(("os-exit-3", "thread-os-exit"), 0 if lost else 3),
        **dict.fromkeys(("keyboard", "SIGINT"), interrupted),
        "exit-3": 3,
        "SIGKILL": 0 if replaces else 5,
        "SIGSEGV": 0 if replaces else 139,
        "SIGTERM": _of_notice(case),
    }
    if place == "loader":  # its rank sees that it is gone
        return int(way != "thread-exit")
    return codes.get(way, 1)


def _of_notice(case: Case) -> int:
    """Of SIGTERM: caught from the end of ``paceline.start`` on, if somebody needs to know."""
    if case.start in ("python", "torchrun"):
        return -signal.SIGTERM
    if case.place == "after":
        return 0
    if case.place != "middle":
        return 0 if case.who == "one" and case.start in ("elastic", "standby", "machines") else 5
    return 0 if case.who == "one" and case.start in ("elastic", "standby") else 75


def _cases() -> list[object]:
    cases = [Case(*one) for one in product(WAYS, PLACES, ("all", "one"), STARTS)]
    cases = [one for one in cases if one.exists]
    everything = os.environ.get("EXIT_CODES") == "all"
    found: list[object] = []
    for shift in (0, 1):
        for number, way in enumerate(WAYS):
            order = [one for one in cases if one.way == way]
            start = list(STARTS)[(number + 3 * shift) % len(STARTS)]
            place = PLACES[(number // 3 + 2 * shift) % len(PLACES)]
            order.sort(key=lambda one: (one.start != start, one.place != place, one.who != ("all", "one")[number % 2]))
            slow = shift == 1 or order[0].start == "torchrun"
            found.append(pytest.param(order[0], marks=[pytest.mark.slow] if slow else [], id="-".join(order[0])))
            cases.remove(order[0])
    return found + [pytest.param(one, marks=pytest.mark.slow, id="-".join(one)) for one in cases if everything]


Codes = Callable[[str, str], tuple[int, ...]]


@pytest.fixture
def codes(fork_server: ForkServer, tmp_path: Path) -> Codes:
    """The exit codes of a run: one, or those of two machines."""

    def of(script: str, start: str) -> tuple[int, ...]:
        (tmp_path / "train.py").write_text(script)
        processes = fork_server.start(
            [
                Command(words, environment_in(tmp_path), tmp_path / f"{place}.out", tmp_path / f"{place}.err", tmp_path)
                for place, words in enumerate(_commands(start))
            ]
        )
        try:
            found = tuple(one.wait(120.0) for one in processes)
        finally:
            for one in processes:
                one.send_signal(signal.SIGKILL)
        check_nothing_is_left(tmp_path)
        return found

    return of


def _commands(start: str) -> list[tuple[str, ...]]:
    words = STARTS[start]
    if start == "python":
        return [("train.py",)]
    if start == "torchrun":
        return [("torchrun.py", *words)]
    if start != "machines":
        return [(*PACELINE, "run", "--quiet", *words, "train.py")]
    more = "run", "--quiet", "--patience", "30", *words, "--rendezvous", f"127.0.0.1:{choose_port(None)}"
    return [(*PACELINE, *more, "--runs-dir", f"runs{place}", "train.py") for place in range(2)]


def script(case: Case) -> str:
    what = f"if mine(NUMBER): {WAYS[case.way]}"
    place = case.place
    if place in ("data", "loader"):
        place, what = "data", f"if index == 30: {WAYS[case.way]}"
    text = TRAIN.replace(f"# {place}\n", f"{what}\n")
    text = BOTH_MACHINES + text if case.start == "machines" else text
    return text.replace("WHO", repr(case.who)).replace("LOADERS", str(int(case.place == "loader")))


BOTH_MACHINES = """
import pathlib, time
deadline = time.monotonic() + 60
while not list(pathlib.Path().glob("runs*/*/launch-*.json")) and time.monotonic() < deadline:
    time.sleep(0.01)  # else the run may be over before the second one has come
"""
TORCHRUN = """
import sys
from torch.distributed.run import main
main([*sys.argv[1:], "train.py"])
"""


@pytest.mark.promise("docs/errors.md", "that code, before, during and after training, with `--elastic` as well")
@pytest.mark.sampled(9, turns=6)
@pytest.mark.parametrize("case", _cases())
def test_ways_to_end(codes: Codes, case: Case, tmp_path: Path) -> None:
    (tmp_path / "torchrun.py").write_text(TORCHRUN)
    found = codes(script(case), case.start)
    said = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.err")))
    assert set(found) == {expected(case)}, f"{found}\n{said}"


@pytest.mark.parametrize("start", ["one", "elastic"])
def test_a_script_that_is_missing(start: str, fork_server: ForkServer, tmp_path: Path) -> None:
    words = [*PACELINE, "run", *STARTS[start], "none.py"]
    command = Command(tuple(words), environment_in(tmp_path), tmp_path / "out", tmp_path / "err", tmp_path)
    assert fork_server.run(command, 60.0) == 2
