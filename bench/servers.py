"""How fast weights and gradients go to and from parameter servers.

Four workers, 10 MB of parameters, hardly any computation. Each step pushes the gradients and pulls the
weights: 20 MB. Beside it, in the same processes, plain gloo: each worker sends 10 MB and receives 10 MB, between rank 0
and the others as with one server, and between pairs; the faster of the two counts.

    python bench/servers.py [rounds]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from paceline.testing.ranks import run

SERVERS = """
import json, os, time
from functools import partial
import torch, torch.distributed as dist
import paceline

MEGABYTES, STEPS = 10, 40
send, receive = (getattr(one, "__wrapped__", one) for one in (dist.isend, dist.irecv))

class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(MEGABYTES * 2**18 // 4) for _ in range(4))

def forward(model, microbatch):
    return sum(part.mean() for part in model.parts) + microbatch.sum() * 0.0

def rate_of_servers(server):
    session = paceline.start(
        model=Weights(), optimizer=partial(torch.optim.SGD, lr=0.1), forward=forward, data=torch.ones(1 << 16, 1),
        batch=4, threads=1, strategy="parameter-server", server=server, timeout_seconds=60,
    )
    for batch in session.batches(steps=8):
        session.step(batch)
    begin = time.perf_counter()
    for batch in session.batches(steps=STEPS):
        session.step(batch)
    pushes = STEPS * (4 if server["mode"] == "sync" else 1)
    return pushes * 2 * MEGABYTES * 2**20 / (time.perf_counter() - begin)

def rate_of_gloo(peers_of, rounds=10):
    out, into = torch.zeros(4, MEGABYTES * 2**18), torch.zeros(4, MEGABYTES * 2**18)
    peers = peers_of[dist.get_rank()]
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(rounds):
        works = [receive(into[peer], peer) for peer in peers] + [send(out[peer], peer) for peer in peers]
        for work in works:
            work.wait()
    dist.barrier()
    moved = sum(map(len, peers_of)) * rounds * MEGABYTES * 2**20
    return moved / (time.perf_counter() - begin)

WAYS = {
    "async": {"mode": "async"},
    "async, a dedicated server": {"mode": "async", "dedicated": True},
    "bounded": {"mode": "bounded"},
    "sync": {"mode": "sync"},
}
rates = {name: rate_of_servers(server) for name, server in WAYS.items()}
star, pairs = [[1, 2, 3], [0], [0], [0]], [[1], [0], [3], [2]]
for name, peers in (("gloo, star", star), ("gloo, pairs", pairs)):
    rate_of_gloo(peers, 2)
    rates[name] = rate_of_gloo(peers)
if os.environ["RANK"] == "0":
    print(json.dumps(rates), flush=True)
"""


def told(script: str, workers: int, **environment: str) -> list[dict[str, float]]:
    """What each worker measured, or rank 0 alone."""
    with tempfile.TemporaryDirectory() as folder:
        everyone = run(script, workers, Path(folder), environment=environment)
    if any(one.code for one in everyone):
        raise SystemExit("\n".join(one.err for one in everyone))
    return [json.loads(one.out.splitlines()[-1]) for one in everyone if one.out]


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    rates = medians([told(SERVERS, 4)[0] for _ in range(rounds)])
    gloo = max(rate for name, rate in rates.items() if name.startswith("gloo"))
    print(f"4 workers, 10 MB of parameters, bytes pushed and pulled; median of {rounds}")
    for name, rate in rates.items():
        print(f"  {name:28} {rate / 1e6:8.0f} MB/s   {rate / gloo:6.2f} x gloo")


if __name__ == "__main__":
    main()
