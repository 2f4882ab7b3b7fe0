"""The examples of reinforcement learning learn, and a worker that is killed in a rollout changes no bit."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from fork_server import Command, ForkServer
from launching import Ran, Run

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"reinforce": ("--iterations", 8, "--steps", 60), "ppo": ("--iterations", 5, "--steps", 64)}

# worker 1 is killed in the second step of a rollout of the third iteration
SCRIPT = """
import os, runpy, sys
sys.path.insert(0, {examples!r})
import cart_pole

step, calls = cart_pole.CartPoles.step, []

def counted(self, action):
    calls.append(action)
    if os.environ.get("KILLED") == str(len(calls)) and os.environ.get("PACELINE_WORKER") == "1":
        os.kill(os.getpid(), 9)
    return step(self, action)

cart_pole.CartPoles.step = counted
runpy.run_path({script!r}, run_name="__main__")
"""


def lines(ran: Ran) -> list[str]:
    """What rank 0 has printed, whichever worker it was."""
    assert ran.code == 0, ran.report()
    return sorted(line for text in ran.logs.values() for line in text.splitlines() if line.startswith(("it", "fi")))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_kill_in_a_rollout_changes_no_bit(name: str, run: Run) -> None:
    script = SCRIPT.format(examples=str(EXAMPLES), script=str(EXAMPLES / f"{name}.py"))
    given, exact = (*SMALL[name], "--save", "weights.pt"), ("--set", "exact=true")
    alone = lines(run(script, "-n", 1, *exact, arguments=given, name="alone"))
    found = [re.search(r"mean return (.+)|(\d+) steps, (\d+) poles fell", line) for line in alone]
    returns = [float(one[1] or int(one[2]) / max(1, int(one[3]))) for one in found if one]
    assert len(returns) == SMALL[name][1] and returns[-1] > 1.5 * returns[0]
    for workers in (2, 4):
        steps = 8 // workers * int(SMALL[name][3])  # in a rollout of one iteration
        words = "-n", workers, "--elastic", f"1:{workers}", *exact
        killed = run(script, *words, arguments=given, name=f"{workers}-workers", KILLED=str(2 * steps + 2))
        assert len(killed.launcher("lost")) == 1, killed.report()
        assert lines(killed) == alone, killed.report()


@pytest.mark.slow
def test_ppo_in_plain_pytorch_learns(fork_server: ForkServer, tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    words = (str(EXAMPLES / "ppo_plain.py"), *map(str, SMALL["ppo"]))
    assert fork_server.run(Command(words, os.environ, out, err, tmp_path), 120) == 0, err.read_text()
    fell = [int(number) for number in re.findall(r"(\d+) poles fell", out.read_text())]
    assert len(fell) == SMALL["ppo"][1] and fell[-1] < fell[0] / 1.5
