"""Embeddings of digits by comparing two views of each (SimCLR), on many workers: paceline run -n 2 contrastive.py"""

import argparse

import torch
from digits_data import read_digits
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.optim import Adam
from torch.utils.data import Dataset

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--save", default="contrastive.pt", help="where to save the weights")
args = parser.parse_args()


class TwoViews(Dataset):
    def __init__(self, digits):
        self.digits = digits

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        return self.digits[index][0], self.digits[index][0]  # shifted differently


torch.manual_seed(0)
train_set = TwoViews(read_digits([], shift=1)[0])
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


def embed(model, views):
    first, second = views
    return {"first": normalize(model(first)), "second": normalize(model(second))}


def contrastive(outputs, batch):
    vectors = torch.cat([outputs["first"], outputs["second"]])
    likeness = vectors @ vectors.t() / 0.2
    likeness.fill_diagonal_(-1e9)
    other_view = torch.arange(len(vectors)).roll(len(vectors) // 2)
    return cross_entropy(likeness, other_view)


given = {"forward": embed, "batch_loss": contrastive, "data": train_set, "batch": 128}
session = paceline.start(model=model, optimizer=lambda p: Adam(p, lr=3e-3), **given)
for epoch in session.epochs(args.epochs):
    train_loss = 0
    for batch in session.batches():
        train_loss += session.step(batch).loss * batch.samples
    session.print(f"epoch {epoch}  train loss {train_loss / len(train_set):.4f}")
session.export(args.save)
