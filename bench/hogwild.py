"""What a second process gains in hogwild, beside plain loops that share their parameters.

The model is sparse: a bag of embeddings from a million rows, and a linear layer. Each process has one thread. The plain
loops have their parameters in shared memory, do not know of each other, and take half the steps each: no more can be
gained. All take turns; a rate is that of the steps after the first ones, up to the end of the last one of all workers.

    python bench/hogwild.py [rounds]
"""

from __future__ import annotations

import sys

from servers import medians, told

TASK = """
import json, os, time
from functools import partial
import torch
from torch import nn
from torch.utils.data import TensorDataset

ROWS, WIDTH, WORDS, SAMPLES, BATCH, FIRST, STEPS = 1_000_000, 16, 32, 1 << 16, 128, 20, 2000

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.EmbeddingBag(ROWS, WIDTH, sparse=True)
        self.output = nn.Linear(WIDTH, 2)

    def forward(self, words):
        return self.output(self.rows(words))

def data():
    words = torch.randint(ROWS, (SAMPLES, WORDS), generator=torch.Generator().manual_seed(0))
    return TensorDataset(words, words[:, 0] % 2)

torch.manual_seed(0)
optimizer = partial(torch.optim.SGD, lr=0.1)
"""

PLAIN = (
    TASK
    + """
def loop(rank, workers, model, barrier, told):
    torch.set_num_threads(1)
    train_set, updates, order = data(), optimizer(model.parameters()), torch.randperm(SAMPLES).split(BATCH)
    for step in range(rank, FIRST * workers + STEPS, workers):
        if step == rank + FIRST * workers:
            barrier.wait()
            begin, used = time.perf_counter(), time.process_time()
        words, targets = train_set[order[step % len(order)]]
        updates.zero_grad()
        nn.functional.cross_entropy(model(words), targets).backward()
        updates.step()
    used = time.process_time() - used
    barrier.wait()
    told.put((STEPS / (time.perf_counter() - begin), used))

if __name__ == "__main__":
    workers, model = int(os.environ["WORKERS"]), Bag().share_memory()
    start = torch.multiprocessing.get_context("spawn")
    barrier, told = start.Barrier(workers), start.Queue()
    torch.multiprocessing.spawn(loop, (workers, model, barrier, told), workers)
    rates, used = zip(*(told.get() for _ in range(workers)))
    print(json.dumps({"rate": min(rates), "processor": sum(used) / STEPS}))
"""
)

PACELINE = (
    TASK
    + """
import paceline

session = paceline.start(
    model=Bag(), optimizer=optimizer, loss=nn.functional.cross_entropy, data=data(), batch=BATCH, threads=1,
    strategy="hogwild", timeout_seconds=60,
)
for batch in session.batches(steps=FIRST + STEPS):
    if batch.step == FIRST:
        begin, used = time.perf_counter(), time.process_time()
    session.step(batch)
spent = time.perf_counter() - begin, time.process_time() - used
told = session._context.world.gather(spent, "bench")
if session.rank == 0:
    rate = STEPS / max(seconds for seconds, _ in told)
    print(json.dumps({"rate": rate, "processor": sum(used for _, used in told) / STEPS}))
"""
)

WAYS = {
    ("plain loops", 1): lambda: told(PLAIN, 1, WORKERS="1"),
    ("plain loops", 2): lambda: told(PLAIN, 1, WORKERS="2"),
    ("paceline", 1): lambda: told(PACELINE, 1),
    ("paceline", 2): lambda: told(PACELINE, 2),
}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    taken = [{way: measure()[0] for way, measure in WAYS.items()} for _ in range(rounds)]
    print(f"hogwild, a bag of embeddings; median of {rounds}")
    for name in ("plain loops", "paceline"):
        for workers in (1, 2):
            spent = medians([one[name, workers] for one in taken])
            print(
                f"  {name:12} {workers} process{'es' if workers > 1 else '  '} {spent['rate']:7.0f} steps/s "
                f"{spent['processor'] * 1e3:6.2f} ms of processor time a step"
            )
        gain = medians([{"gain": one[name, 2]["rate"] / one[name, 1]["rate"]} for one in taken])["gain"]
        print(f"  {name:12} {gain:.2f} times as many steps per second")


if __name__ == "__main__":
    main()
