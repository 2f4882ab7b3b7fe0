"""What N times the batch does to the loss, and what helps: python learning_rate.py [--real] [--plot FILE]"""

import argparse
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

SAMPLES, EACH, RATE, EPOCHS = 2048, 16, 0.05, 4
WORKERS = (4, 16, 64)
RULES = {"none": lambda n: 1.0, "sqrt": lambda n: n**0.5, "linear": float, "linear, warm-up": float}


def training_set():
    """Points of 20 dimensions, in the classes of a fixed random net."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 20)
    with torch.no_grad():
        return inputs, nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))(inputs).argmax(dim=1)


def train(**settings):
    """Return the session after the same number of samples, whatever the batch."""
    torch.manual_seed(1)
    session = paceline.start(
        model=nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)),
        loss=nn.functional.cross_entropy,
        data=data,
        exact=True,
        microbatches=4,
        **settings,
    )
    for batch in session.batches(epochs=EPOCHS):
        session.step(batch)
    return session


def emulate(workers, rule):
    """Return the loss of N workers with 16 samples each: one process does the same."""
    batch = EACH * workers
    factor, warm = RULES[rule](workers), EPOCHS * SAMPLES // batch // 4 if "warm" in rule else 0
    rate = partial(torch.optim.SGD, lr=RATE * factor)
    ramp = partial(
        torch.optim.lr_scheduler.LambdaLR,
        lr_lambda=lambda step: min(1.0, (1 + (factor - 1) * (step + 1) / warm) / factor) if warm else 1.0,
    )
    return train(batch=batch, optimizer=rate, schedule=ramp).evaluate(data)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--real", action="store_true", help="only train on the workers that were started")
parser.add_argument("--plot", help="file for a picture, by matplotlib")
arguments = parser.parse_args()
data = TensorDataset(*training_set())
if arguments.real:
    session = train(batch_per_worker=EACH, scale_lr="linear", optimizer=partial(torch.optim.SGD, lr=RATE))
    session.print(f"{session.workers} workers, linear: {session.evaluate(data):.4f}")
    raise SystemExit
print(f"1 worker: {emulate(1, 'none'):.4f}")
print(f"{'workers':16}" + "".join(f"{workers:>9}" for workers in WORKERS))
losses = {}
for rule in RULES:
    losses[rule] = [emulate(workers, rule) for workers in WORKERS]
    print(f"{rule:16}" + "".join(f"{loss:9.4f}" for loss in losses[rule]), flush=True)
if arguments.plot:
    from matplotlib import pyplot

    for rule, values in losses.items():
        pyplot.semilogx(WORKERS, values, "o-", base=2, label=rule)
    pyplot.xlabel("workers with 16 samples each")
    pyplot.ylabel("loss after 4 epochs")
    pyplot.legend()
    pyplot.savefig(arguments.plot)
