"""One script for one process and for many: python first.py, then paceline run -n 4 first.py"""

from functools import partial

import torch
from torch import nn

import paceline

torch.manual_seed(0)  # before the model: all workers must build the same one
inputs = torch.randn(512, 20)
targets = (inputs[:, :10].sum(dim=1) > inputs[:, 10:].sum(dim=1)).long()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

session = paceline.start(
    model=model,
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    loss=nn.functional.cross_entropy,
    data=torch.utils.data.TensorDataset(inputs, targets),
    batch=64,
)
for batch in session.batches(epochs=4):
    report = session.step(batch)
session.print(f"{session.workers} workers, {report.step + 1} steps, loss {report.loss:.12f}")
session.print(f"fingerprint {session.fingerprint()[:16]}")
