"""Data on several machines: time per epoch beside shards read in sequence, uneven shards, and data sorted by class.

epoch      seconds of an epoch over those of DDP, whose workers each read their tar files in sequence and shuffle in
           a buffer, as webdataset does. Both train one model on the same files, epoch by epoch in turns.
uneven     seconds of a step with shards of sizes 1 : 4 over those with equal ones, computing emulated by sleeping
sorted     accuracy after each epoch with a shard for each class, beside a global shuffle of the same pictures

python bench/located.py
python bench/located.py uneven --rounds 5
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

PARTS = ("epoch", "uneven", "sorted")
EPOCH = """
import io, json, os, random, tarfile, time
from functools import partial
from pathlib import Path
import torch, paceline
from torch import nn
from paceline.data import Located

rank, workers, rounds = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["ROUNDS"])
SIZES, BATCH, SHAPE, BUFFER = [256] * 8, 128, (3, 64, 64), 500

def write(path, size):
    pictures = torch.randint(0, 256, (size, *SHAPE), dtype=torch.uint8)
    with tarfile.open(path, "w") as tar:
        for number, picture in enumerate(pictures):
            for name, data in (("bytes", picture.numpy().tobytes()), ("cls", b"%d" % (int(picture[0, 0, 0]) % 10))):
                about = tarfile.TarInfo(f"{number:06d}.{name}")
                about.size = len(data)
                tar.addfile(about, io.BytesIO(data))

def sample_of(picture, label):
    return torch.frombuffer(bytearray(picture), dtype=torch.uint8).view(SHAPE).float() / 255, int(label)

class Indexed(torch.utils.data.Dataset):
    "A tar file whose samples are read by their positions."
    def __init__(self, path):
        with tarfile.open(path) as tar:
            found = [(one.offset_data, one.size) for one in tar]
        self.pairs, self.file = list(zip(found[::2], found[1::2])), os.open(path, os.O_RDONLY)
    def __len__(self):
        return len(self.pairs)
    def __getitem__(self, number):
        return sample_of(*(os.pread(self.file, size, first) for first, size in self.pairs[number]))

class Streamed(torch.utils.data.IterableDataset):
    "Tar files read in sequence, through a buffer from which samples are drawn."
    def __init__(self, paths):
        self.paths = paths
    def __iter__(self):
        kept = []
        for path in random.sample(self.paths, len(self.paths)):
            with tarfile.open(path, "r|") as tar:
                members = iter(tar)
                for one in members:
                    picture = tar.extractfile(one).read()
                    kept.append(sample_of(picture, tar.extractfile(next(members)).read()))
                    if len(kept) > BUFFER:
                        yield kept.pop(random.randrange(len(kept)))
        random.shuffle(kept)
        yield from kept

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(),
                         nn.Flatten(), nn.Linear(64 * 225, 10))

torch.manual_seed(rank)
own = [Path(__file__).with_name(f"{shard}.tar") for shard in range(len(SIZES)) if shard * workers // len(SIZES) == rank]
for path in own:
    write(path, SIZES[int(path.stem)])
session = paceline.start(model=net(), optimizer=partial(torch.optim.SGD, lr=0.01), loss=nn.functional.cross_entropy,
                         data=Located({path.name: Indexed(path) for path in own}), batch=BATCH)
model = nn.parallel.DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Streamed(own), batch_size=BATCH // workers)

def ours():
    for batch in session.batches(epochs=1):
        session.step(batch)

def theirs():
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

def timed(epoch):
    torch.distributed.barrier()
    begin, computing = time.perf_counter(), time.process_time()
    epoch()
    torch.distributed.barrier()
    return time.perf_counter() - begin, time.process_time() - computing

ours(), theirs()
print(json.dumps([(timed(ours), timed(theirs)) for _ in range(rounds)]))
"""
UNEVEN = """
import json, os, statistics, time
from functools import partial
import torch, paceline
from paceline.data import Located

rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def held_by(kind):
    if kind == "all on one":
        return range(workers) if rank == 0 else []
    return {rank, (rank - 1) % workers} if kind == "two holders" else [rank]

def shard_of(kind, shard):
    size = 320 if kind == "even" else [128, 512][shard % 2]
    rows = torch.randn(size, 8, generator=torch.Generator().manual_seed(shard))
    return torch.utils.data.TensorDataset(rows, rows[:, :1])

def forward(model, microbatch):
    time.sleep(0.02)
    return torch.nn.functional.mse_loss(model(microbatch[0]), microbatch[1])

def train(kind, strategy, move):
    torch.manual_seed(0)
    data = Located({str(shard): shard_of(kind, shard) for shard in held_by(kind)}, move=move)
    session = paceline.start(model=torch.nn.Linear(8, 1), optimizer=partial(torch.optim.SGD, lr=0.01), forward=forward,
                             data=data, batch=128, microbatches=32, exact=True, strategy=strategy)
    seconds = []
    for batch in session.batches(steps=48):  # with move="auto", the first 30 or so measure
        begin = time.perf_counter()
        session.step(batch)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[-8:])

print(json.dumps([train(*case) for case in json.loads(os.environ["CASES"])]))
"""
SORTED = """
import json, os
from functools import partial
import torch, paceline
from sklearn.datasets import load_digits
from paceline.data import Located

inputs, targets = load_digits(return_X_y=True)
inputs, targets = torch.tensor(inputs).float() / 16, torch.tensor(targets)
found = {}
for seed in range(3):
    shuffled = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    train, test = shuffled[:1437], shuffled[1437:]
    rows = torch.utils.data.TensorDataset(inputs[train], targets[train])
    classes = {str(one): torch.utils.data.Subset(rows, (targets[train] == one).nonzero().view(-1).tolist())
               for one in range(10)}
    for kind, data in (("sorted", Located(classes)), ("global", rows)):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        session = paceline.start(
            model=model, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            loss=torch.nn.functional.cross_entropy, data=data, batch=64, microbatches=16, seed=seed)
        for epoch in range(6):
            for batch in session.batches(epochs=1):
                session.step(batch)
            with torch.no_grad():
                right = model(inputs[test]).argmax(1).eq(targets[test]).float().mean().item()
            found.setdefault(kind, [[] for _ in range(6)])[epoch].append(right)
print(json.dumps(found))
"""


def run(script: str, workers: int, **environment: Any) -> Any:
    """Return what rank 0 prints last."""
    given = {"OMP_NUM_THREADS": "1", **{name: str(value) for name, value in environment.items()}}
    with tempfile.TemporaryDirectory() as folder:
        everyone = ranks.run(script, workers, Path(folder), environment=given, deadline=600)
    if any(one.code for one in everyone):
        raise SystemExit("\n".join(one.err for one in everyone))
    return json.loads(everyone[0].out.splitlines()[-1])


def epoch(workers: int, rounds: int) -> None:
    pairs = run(EPOCH, workers, ROUNDS=rounds)
    for place, what in enumerate(("seconds", "seconds of a processor")):
        column = [(ours[place], theirs[place]) for ours, theirs in pairs]
        ratio = statistics.median(ours / theirs for ours, theirs in column)
        ours, theirs = (statistics.median(one) for one in zip(*column, strict=True))
        print(f"epoch, {workers} workers: {ours:.2f} {what}, with DDP {theirs:.2f}: {ratio:.2f}", flush=True)


def uneven(rounds: int) -> None:
    cases = [
        ("even", "allreduce", "never"),
        ("one holder", "allreduce", "never"),
        ("two holders", "stealing", "never"),
        ("one holder", "allreduce", "samples"),
        ("all on one", "allreduce", "samples"),
        ("all on one", "allreduce", "auto"),
    ]
    everyone = [run(UNEVEN, 4, CASES=json.dumps(cases)) for _ in range(rounds)]
    for place, (kind, strategy, move) in enumerate(cases[1:], 1):
        ratio = statistics.median(seconds[place] / seconds[0] for seconds in everyone)
        print(f"uneven, {kind}, {strategy}, move={move!r}: step {ratio:.2f} of even shards", flush=True)


def by_class() -> None:
    for kind, epochs in run(SORTED, 1).items():
        means = ", ".join(f"{statistics.mean(one):.3f} ± {statistics.stdev(one):.3f}" for one in epochs)
        print(f"sorted, {kind}: accuracy after epochs 1 to {len(epochs)}: {means}", flush=True)


def main() -> None:
    """Print the figures of the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if unknown := set(options.parts) - {*PARTS}:
        parser.error(f"there is no {min(unknown)!r}; there are {', '.join(PARTS)}")
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    for part in options.parts or PARTS:
        {"epoch": lambda: epoch(options.workers, options.rounds), "uneven": lambda: uneven(options.rounds)}.get(
            part, by_class
        )()


if __name__ == "__main__":
    main()
