"""A worker is killed while gradients are on the wire: a part of a message has come, and the rest never does."""

from pathlib import Path

import pytest
from test_machines import Hosts, hosts, last_line_of, memberships, needs_root  # noqa: F401

STEPS, DEADLINE = 3, 600
"""A worker that waits for the rest of a message does so for that long; the test does not."""

# The victim dies in step 1, when a part of its 27 MB has left it: the wire is busy for seconds.
SCRIPT = f"""
import os, signal, sys, threading, time
import torch
import paceline
from torch import nn

def sent():
    (line,) = [line for line in open("/proc/self/net/dev") if line.split()[0] == "eth0:"]
    return int(line.split()[9])

def die(limit):
    while sent() < limit:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
samples = torch.randn(12, 1500)
session = paceline.start(
    model=nn.Sequential(*[nn.Linear(1500, 1500) for _ in range(3)]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    loss=nn.functional.mse_loss,
    data=torch.utils.data.TensorDataset(samples, samples),
    batch=12,
    reduction=sys.argv[1],
    exact=True if sys.argv[1] == "tree" else "fixed-point",
    timeout_seconds={DEADLINE},
)
for batch in session.batches(steps={STEPS}):
    if batch.step == 1 and os.environ.get("PACELINE_WORKER") == "1000":
        threading.Thread(target=die, args=(sent() + 5_000_000,), daemon=True).start()
    session.step(batch)
print("fingerprint", session.fingerprint(), flush=True)
"""


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("reduction", ["tree", "collective"])
def test_nobody_waits_for_the_rest_of_a_message(hosts: Hosts, tmp_path: Path, reduction: str) -> None:  # noqa: F811
    hosts.script = SCRIPT
    hosts.limit_rate("100mbit")
    options = "--nodes", "3", "--elastic", "3:3"
    agents = [hosts.start(place, STEPS, *options, arguments=(reduction,)) for place in range(3)]
    assert agents[0].wait(100) == 0
    assert [sorted(members) for members in memberships(hosts)] == [[0, 1000, 2000], [0, 1001, 2000]]
    assert hosts.fingerprints() == {last_line_of(tmp_path, SCRIPT, reduction)}
