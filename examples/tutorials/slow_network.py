"""The bytes that four workers send for one training: python slow_network.py [--plot FILE]"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

WAYS = {
    "float32": {},
    "bfloat16": {"wire": "bfloat16"},
    "int8": {"wire": "int8"},
    "fp8-e4m3": {"wire": "fp8-e4m3"},
    "topk": {"wire": "topk"},
    "diloco, 8": {"strategy": "diloco", "local": {"every": 8}},
    "diloco, 32": {"strategy": "diloco", "local": {"every": 32}},
}


def train(epochs):
    """Return the loss and the fingerprint of each way."""
    torch.manual_seed(0)
    inputs = torch.randn(2048, 20)
    with torch.no_grad():
        targets = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))(inputs).argmax(dim=1)
    data, found = TensorDataset(inputs, targets), {}
    for name, settings in WAYS.items():
        torch.manual_seed(1)
        session = paceline.start(
            model=nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5)),
            optimizer=partial(torch.optim.AdamW, lr=2e-3),
            loss=nn.functional.cross_entropy,
            data=data,
            batch=128,
            exact=True,
            **settings,
        )
        for batch in session.batches(epochs=epochs):
            session.step(batch)
        found[name] = session.evaluate(data), session.fingerprint()[:8]
    return found


def sent(run):
    """Return the bytes that all workers sent in each session, in order."""
    totals = [0] * len(WAYS)
    for path in run.glob("events/rank-*.jsonl"):
        session = -1
        for event in map(json.loads, path.read_text().splitlines()):
            session += event["event"] == "start"
            if event["event"] == "exchange":
                totals[session] += event["bytes"]
    return totals


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--plot", help="file for a picture, by matplotlib")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = paceline.launch(train, arguments.epochs, workers=4, name="ways", runs_dir=folder)[0]
        totals = sent(Path(folder) / "ways")
    for (name, (loss, fingerprint)), total in zip(found.items(), totals, strict=True):
        print(f"{name:12} {total / 1e6:8.2f} MB   loss {loss:.4f}   fingerprint {fingerprint}")
    if arguments.plot:
        from matplotlib import pyplot

        for (name, (loss, _)), total in zip(found.items(), totals, strict=True):
            pyplot.semilogx(total / 1e6, loss, "o", label=name)
        pyplot.xlabel("megabytes sent by four workers")
        pyplot.ylabel("loss")
        pyplot.legend()
        pyplot.savefig(arguments.plot)
