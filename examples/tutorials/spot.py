"""Workers that kill themselves, as spot machines go: paceline run -n 3 --elastic 1:3 spot.py --life 20"""

import argparse
import os
import signal
from functools import partial

import torch
from torch import nn

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--life", type=int, help="number of steps after which each process but that of rank 0 is killed")
parser.add_argument("--epochs", type=int, default=100)
arguments = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(512, 20)
targets = (inputs[:, :10].sum(dim=1) > inputs[:, 10:].sum(dim=1)).long()
session = paceline.start(
    model=nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)),
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    loss=nn.functional.cross_entropy,
    data=torch.utils.data.TensorDataset(inputs, targets),
    batch=64,
    exact=True,
)
for lived, batch in enumerate(session.batches(epochs=arguments.epochs)):  # steps of this process, a replacement or not
    if session.rank > 0 and lived == arguments.life:
        os.kill(os.getpid(), signal.SIGKILL)  # no cleanup, no message: as if the machine had gone
    report = session.step(batch)
session.print(f"{report.step + 1} steps, loss {report.loss:.12f}")
session.print(f"fingerprint {session.fingerprint()[:16]}")
