"""Parameter servers on three machines, beside all-reduce: one worker is three times slower; links of 1 Gbit/s.

Each worker has a network namespace of its own; all are joined by a bridge. A microbatch is a sleep, so that three
workers share two cores honestly, and the model has 20 MB. All ways train one after the other in the same processes,
with the same batches; then once more with the workers on one machine, in shared memory. The numbers are batches a
second, bytes that the first machine's link carried for a batch (counted by the kernel), and the loss at the end.

    python bench/servers_network.py [rounds]             # as root
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORKERS, RATE, BURST_BYTES = 3, "1gbit", 2_500_000
"""The burst is 20 ms at that rate; with less than 10 ms the link would look slower."""
PORT = 29533
DEADLINE = 400.0
SCRIPT = """
import json, os, sys, time
from functools import partial
from pathlib import Path
import torch
import paceline

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SLOW = [1, 1, 3]
torch.manual_seed(0)
inputs = torch.randn(1536, 512)
data = torch.utils.data.TensorDataset(inputs, inputs[:, :10].argmax(1))

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512)

    def forward(self, inputs):
        return inputs + 0.1 * torch.relu(self.layer(inputs))

def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(*(Block() for _ in range(20)), torch.nn.Linear(512, 10))

def loss_of(model, items):
    return torch.nn.functional.cross_entropy(model(items[0]), items[1])

def forward(model, microbatch, seconds, slow):
    time.sleep(len(microbatch[0]) / 8 * seconds * (SLOW[RANK] if slow else 1))
    return loss_of(model, microbatch)

def counted():
    path = Path("/sys/class/net/eth0/statistics")
    return sum(int((path / name).read_text()) for name in ("tx_bytes", "rx_bytes")) if path.exists() else 0

def measure(slow, seconds, steps, given):
    session = paceline.start(
        model=model(), optimizer=partial(torch.optim.SGD, lr=0.02), data=data, batch=96, microbatches=12, threads=1,
        forward=partial(forward, seconds=seconds, slow=slow), timeout_seconds=120, **given,
    )
    for batch in session.batches(steps=3):
        session.step(batch)
    begin, before = time.perf_counter(), counted()
    for batch in session.batches(steps=steps):
        session.step(batch)
    took, moved = time.perf_counter() - begin, counted() - before
    print(f"rank {RANK}: {steps / took:.2f} batches/s", file=sys.stderr, flush=True)
    return {"rate": steps / took, "megabytes": moved / steps / 2**20, "loss": session.evaluate(data, loss_of)}

SERVER = {"strategy": "parameter-server"}
WAYS = {
    "all-reduce": {"strategy": "allreduce"},
    "server, sync": SERVER | {"server": {"count": SIZE}},
    "server, bounded": SERVER | {"server": {"mode": "bounded", "staleness": 1, "count": SIZE}},
    "server, async": SERVER | {"server": {"mode": "async", "count": SIZE}},
    "server, async, one server": SERVER | {"server": {"mode": "async"}},
}
found = {}
for name, given in WAYS.items():
    found[name] = measure(True, SECONDS, 18, given)
for name in ("all-reduce", "server, sync"):
    found[name + ", no compute"] = measure(False, 0.0, 12, WAYS[name])
if RANK == 0:
    print(json.dumps(found), flush=True)
"""


@contextlib.contextmanager
def machines() -> Iterator[list[str]]:
    """Namespaces on one bridge, each with a shaped link in both directions."""
    bridge, names = f"psn{os.getpid() % 10000}", [f"psn{os.getpid() % 10000}n{place}" for place in range(WORKERS)]
    shape = f"root tbf rate {RATE} burst {BURST_BYTES} latency 400ms"
    try:
        _run(f"ip link add {bridge} type bridge")
        _run(f"ip link set {bridge} up")
        for place, name in enumerate(names):
            _run(f"ip netns add {name}")
            _run(f"ip link add {name}c type veth peer name eth0 netns {name}")
            _run(f"ip link set {name}c master {bridge} up")
            _run(f"ip -n {name} addr add 10.219.0.{place + 1}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up")
            _run(f"tc qdisc add dev {name}c {shape}")
            _run(f"tc -n {name} qdisc add dev eth0 {shape}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


def run(names: list[str] | None, seconds: float) -> dict[str, dict[str, float]]:
    """What rank 0 measured; without names in shared memory."""
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT.replace("SECONDS", str(seconds)))
        for rank in range(WORKERS):
            own: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": WORKERS, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            own |= {
                "MASTER_ADDR": "10.219.0.1",
                "MASTER_PORT": PORT,
                "OMP_NUM_THREADS": 1,
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            before = ["ip", "netns", "exec", names[rank]] if names else []
            if not names:
                own |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": WORKERS, "MASTER_ADDR": "127.0.0.1"}
            environment = os.environ | {name: str(value) for name, value in own.items()}
            command = [*before, sys.executable, str(script)]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        try:
            said = [one.communicate(timeout=DEADLINE)[0] for one in processes]
        finally:
            for one in processes:
                one.kill()
                one.wait()
    if any(one.returncode for one in processes):
        raise SystemExit("a worker failed; see above")
    result: dict[str, dict[str, float]] = json.loads(said[0].splitlines()[-1])
    return result


def main() -> None:
    if os.getuid():
        raise SystemExit("needs root, to make network namespaces")
    rounds, seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 3, 0.05
    with machines() as names:
        apart = [run(names, seconds) for _ in range(rounds)]
    together = run(None, seconds)
    print(f"{WORKERS} workers, 20 MB of parameters, {RATE}; the third computes 3 times slower; median of {rounds}")
    print(f"{'':32} {'batches/s':>9} {'to all-reduce':>14} {'MB/batch':>9} {'loss':>7}   {'in shared memory':>16}")
    for name in apart[0]:
        rate, moved, loss = (
            statistics.median(one[name][key] for one in apart) for key in ("rate", "megabytes", "loss")
        )
        base = "all-reduce, no compute" if name.endswith("no compute") else "all-reduce"
        ratio = statistics.median(one[name]["rate"] / one[base]["rate"] for one in apart)
        here = together[name]
        beside = f"{here['rate']:8.2f}/s {here['loss']:6.3f}"
        print(f"{name:32} {rate:9.2f} {ratio:14.2f} {moved:9.1f} {loss:7.3f}   {beside:>16}")


def _run(words: str) -> None:
    subprocess.run(words.split(), check=True, capture_output=True)


if __name__ == "__main__":
    main()
