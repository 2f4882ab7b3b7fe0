"""Embeddings of digits by comparing two views of each (SimCLR): python contrastive_plain.py"""

import argparse

import torch
from digits_data import read_digits
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.optim import Adam
from torch.utils.data import DataLoader, Dataset

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


def contrastive(outputs):
    vectors = torch.cat([outputs["first"], outputs["second"]])
    likeness = vectors @ vectors.t() / 0.2
    likeness.fill_diagonal_(-1e9)
    other_view = torch.arange(len(vectors)).roll(len(vectors) // 2)
    return cross_entropy(likeness, other_view)


optimizer = Adam(model.parameters(), lr=3e-3)
loader = DataLoader(train_set, batch_size=128, shuffle=True)
for epoch in range(args.epochs):
    train_loss = 0
    for views in loader:
        optimizer.zero_grad()
        loss = contrastive(embed(model, views))
        loss.backward()
        optimizer.step()
        train_loss += loss.item() * len(views[0])
    print(f"epoch {epoch}  train loss {train_loss / len(train_set):.4f}")
torch.save(model.state_dict(), args.save)
