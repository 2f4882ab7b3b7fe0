"""One slow worker among four, and five ways to treat it: paceline run -n 4 slow_worker.py [--plot FILE]"""

import argparse
import os
import time
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import paceline

RULES = {
    "allreduce": {"strategy": "allreduce", "exact": True},
    "stealing": {"strategy": "stealing", "exact": True},
    "backup": {"strategy": "backup"},
    "server, async": {"strategy": "parameter-server", "server": {"mode": "async"}},
    "hogwild": {"strategy": "hogwild"},
}


def training_set():
    """Points of 20 dimensions, in the classes of a fixed random net."""
    torch.manual_seed(0)
    inputs = torch.randn(2048, 20)
    with torch.no_grad():
        targets = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))(inputs).argmax(dim=1)
    return TensorDataset(inputs, targets)


def loss(model, microbatch):
    return cross_entropy(model(microbatch[0]), microbatch[1])


def slow_loss(model, microbatch, seconds):
    """Sleep as long as a larger model would compute; the last worker is four times slower."""
    time.sleep(seconds * (4 if os.environ.get("RANK") == "3" else 1))
    return loss(model, microbatch)


def train(rule, data, arguments):
    """Return the session, and the seconds and the loss after each epoch."""
    torch.manual_seed(1)
    session = paceline.start(
        model=nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        forward=partial(slow_loss, seconds=arguments.milliseconds / 1000),
        data=data,
        batch=256,
        microbatches=16,
        **rule,
    )
    curve, begin = [(0.0, session.evaluate(data, loss))], time.perf_counter()
    for _ in session.epochs(arguments.epochs):
        for batch in session.batches():
            session.step(batch)
        curve.append((time.perf_counter() - begin, session.evaluate(data, loss)))
    return session, curve


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--milliseconds", type=float, default=10, help="of a microbatch on a fast worker")
parser.add_argument("--only", choices=RULES, help="train with this strategy alone")
parser.add_argument("--plot", help="file for a picture, by matplotlib")
arguments, data, curves = parser.parse_args(), training_set(), {}
for name in [arguments.only] if arguments.only else RULES:
    session, curves[name] = train(RULES[name], data, arguments)
    seconds, last = curves[name][-1]
    session.print(f"{name:14} {seconds:5.1f} s   loss {last:.4f}   fingerprint {session.fingerprint()[:8]}")
if arguments.plot and session.rank == 0:
    from matplotlib import pyplot

    for name, curve in curves.items():
        pyplot.plot(*zip(*curve, strict=True), "o-", label=name)
    pyplot.gca().set(xlabel="seconds", ylabel="loss")
    pyplot.legend()
    pyplot.savefig(arguments.plot)
