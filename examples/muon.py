"""Handwritten digits, the matrices by Muon and the rest by AdamW, on many workers: paceline run -n 2 muon.py"""

import argparse

import torch
from digits_data import read_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Muon

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--save", default="muon.pt", help="where to save the weights")
args = parser.parse_args()

torch.manual_seed(0)
train_set, test_set = read_digits([])
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy(output, target):
    return (output.argmax(dim=1) == target).float().mean()


parameters = list(model.parameters())
matrices = [parameter for parameter in parameters if parameter.ndim == 2]
rest = [parameter for parameter in parameters if parameter.ndim != 2]
optimizers = [Muon(matrices, lr=0.02), AdamW(rest, lr=3e-3)]
session = paceline.start(model=model, optimizer=lambda model: optimizers, loss=cross_entropy, data=train_set, batch=64)
for epoch in session.epochs(args.epochs):
    train_loss = 0
    for batch in session.batches():
        train_loss += session.step(batch).loss * batch.samples
    share = session.evaluate(test_set, accuracy)
    session.print(f"epoch {epoch}  train loss {train_loss / len(train_set):.4f}  accuracy {share:.4f}")
session.export(args.save)
