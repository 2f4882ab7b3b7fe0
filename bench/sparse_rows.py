"""Step time and bytes of a sparse embedding over those of a dense one, in the same run.

A table of 1,000,000 x 32 and SparseAdam or Adam; a batch touches 4,096 rows. The workers are on this machine, with and
without shared memory, and train with strategies allreduce, sharded and parameter-server, which has a server at each
worker. Bytes are those of all messages of a worker in a step. A row needs its values and an index of 4 bytes: with
allreduce for each other worker; otherwise for its owner and, without shared memory, once more from there for each other
worker. With a divided table (``paceline.SparseEmbedding``, each worker on a machine of its own), a row goes to its
owner and comes from there. With asynchronous servers a worker computes a whole batch, so bytes are those that all
workers send for one; in shared memory they send none.

    python bench/sparse_rows.py
    python bench/sparse_rows.py --workers 4 --steps 5 --only "sharded, divided"
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from paceline.testing import ranks

ROWS, WIDTH, BATCH, WORDS = 1_000_000, 32, 64, 64
SCRIPT = """
import json, os, time
import torch
from torch import nn
import paceline
from paceline.comm import world
from paceline.comm.servers import rpc

kind, steps, given = os.environ["KIND"], int(os.environ["STEPS"]), json.loads(os.environ["GIVEN"])
sent, transfers = [0], world.World.start_transfers
def counted(self, sends, receives, *more, **named):
    sent[0] += sum(one.tensor.nbytes for one in sends)
    return transfers(self, sends, receives, *more, **named)
world.World.start_transfers = counted
send = rpc._send
def counted_send(write, words, parts):
    sent[0] += sum(memoryview(part).nbytes for part in parts)
    send(write, words, parts)
start, finish, staged = rpc.RpcClient.start, rpc.RpcClient.finish, [0]
def counted_start(self, what, words=None, parts=()):
    sent[0] += sum(memoryview(part).nbytes for part in parts)
    staged[0] += what == "shard.stage"
    self.asked = what
    start(self, what, words, parts)
def counted_finish(self):
    answer, data = finish(self)
    sent[0] += len(data) * (self.asked != "shard.fetch")  # which is for the end
    return answer, data
if given["exact"]:
    rpc._send = counted_send
else:  # a worker counts both ways, as it may compute nothing while it answers
    rpc.RpcClient.start, rpc.RpcClient.finish = counted_start, counted_finish

class Rows(paceline.SparseEmbedding):
    def forward(self, words):
        return super().forward(words).mean(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.top = nn.Linear(WIDTH, 1)
        self.table = Rows(ROWS, WIDTH) if kind == "divided" else nn.EmbeddingBag(ROWS, WIDTH, sparse=kind == "sparse")
    def forward(self, words):
        return self.top(self.table(words)).squeeze(1)

def optimizers(model):
    if kind == "dense":
        return torch.optim.Adam(model.parameters())
    return [torch.optim.SparseAdam(model.table.parameters()), torch.optim.Adam(model.top.parameters())]

torch.manual_seed(0)
words = torch.randperm(ROWS)[: BATCH * WORDS * (steps + 3)].view(-1, WORDS)
session = paceline.start(model=Net(), optimizer=optimizers, loss=nn.functional.mse_loss, batch=BATCH,
                         data=torch.utils.data.TensorDataset(words, words[:, 0] / ROWS), **given)
seconds, crossed = [], []
for batch in session.batches(steps=steps + 3):
    begin, before = time.perf_counter(), sent[0]
    session.step(batch)
    seconds.append(time.perf_counter() - begin)
    crossed.append(sent[0] - before)
middle = sorted(seconds[3:])[steps // 2] if given["exact"] else sum(seconds[3:]) / steps  # a worker computes some steps
total = sent[0] if staged[0] else sorted(crossed[3:])[steps // 2]
print(json.dumps({"seconds": middle, "bytes": total, "staged": staged[0], "fingerprint": session.fingerprint()}))
"""


def ways(workers: int) -> list[tuple[str, dict[str, Any], bool, str]]:
    """Return the name of each way to train, its settings, whether the workers share memory, and the kind of table."""
    servers = {"strategy": "parameter-server", "exact": True, "server": {"count": workers}}
    waiting = {"allreduce": {"exact": True}, "sharded": {"strategy": "sharded", "exact": True}}
    waiting |= {"parameter-server": servers}
    found = [(name, given, shared, "sparse") for name, given in waiting.items() for shared in (True, False)]
    found += [(f"{name}, divided", waiting[name], False, "divided") for name in ("sharded", "parameter-server")]
    own = servers | {"exact": False, "server": {"mode": "async", "count": workers}}
    name = "parameter-server, async"
    return [*found, (name, own, True, "sparse"), (name, own, False, "divided")]


def measure(kind: str, given: dict[str, Any], workers: int, steps: int, one_machine: bool) -> dict[str, float]:
    """Return the time of a step, the bytes of a worker in it, and the fingerprint."""
    script = SCRIPT.replace("ROWS", str(ROWS)).replace("WIDTH", str(WIDTH))
    script = script.replace("BATCH", str(BATCH)).replace("WORDS", str(WORDS))
    environment = {"KIND": kind, "GIVEN": json.dumps(given), "STEPS": str(steps), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        everyone = ranks.run(
            script, workers, Path(folder), environment=environment, one_machine=one_machine, deadline=300
        )
    if any(one.code for one in everyone):
        raise SystemExit("\n".join(one.err for one in everyone))
    told = [json.loads(one.out.splitlines()[-1]) for one in everyone]
    if not given["exact"] and not one_machine:  # each batch is staged once at each other worker
        told[0]["bytes"] = sum(one["bytes"] for one in told) * (workers - 1) / sum(one["staged"] for one in told)
    return told[0]


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="ways whose name begins so")
    options = parser.parse_args()
    workers, steps = options.workers, options.steps
    alone = dict[str, str]()
    own = BATCH * WORDS / workers * (4 * WIDTH + 4) * (workers - 1)
    for name, given, one_machine, table in ways(workers):
        if not name.startswith(options.only):
            continue
        if table not in alone:
            alone[table] = str(measure(table, {"exact": True}, 1, steps, True)["fingerprint"])
        ratios, found = [], {}
        for _ in range(options.rounds):
            found = {kind: measure(kind, given, workers, steps, one_machine) for kind in ("dense", table)}
            ratios.append(found[table]["seconds"] / found["dense"]["seconds"])
        back = own / workers if table == "divided" else own * (not one_machine)
        needed = own if name == "allreduce" else own / workers + back
        if not given["exact"]:
            needed = 2 * own  # there and back, of a whole batch
        same = f"; same bits as one worker: {found[table]['fingerprint'] == alone[table]}"
        print(
            f"{name}, {workers} workers, {'shared memory' if one_machine else 'sockets'}: step "
            f"{statistics.median(ratios):.2f} of dense ({found[table]['seconds']:.3f} s); bytes "
            f"{found[table]['bytes'] / needed:.2f} of what the rows need, {found['dense']['bytes']:,} with dense"
            f"{same if given['exact'] else ''}",
            flush=True,
        )


if __name__ == "__main__":
    main()
