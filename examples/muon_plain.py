"""Handwritten digits, the matrices by Muon and the rest by AdamW, in plain PyTorch: python muon_plain.py"""

import argparse

import torch
from digits_data import read_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Muon
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--save", default="muon.pt", help="where to save the weights")
args = parser.parse_args()

torch.manual_seed(0)
train_set, test_set = read_digits([])
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy(output, target):
    return (output.argmax(dim=1) == target).float().mean()


def evaluate(model, data, metric):
    model.eval()
    with torch.no_grad():
        total = sum(metric(model(x), y).item() * len(y) for x, y in DataLoader(data, batch_size=256))
    model.train()
    return total / len(data)


parameters = list(model.parameters())
matrices = [parameter for parameter in parameters if parameter.ndim == 2]
rest = [parameter for parameter in parameters if parameter.ndim != 2]
optimizers = [Muon(matrices, lr=0.02), AdamW(rest, lr=3e-3)]
loader = DataLoader(train_set, batch_size=64, shuffle=True)
for epoch in range(args.epochs):
    train_loss = 0
    for inputs, targets in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        train_loss += loss.item() * len(targets)
    share = evaluate(model, test_set, accuracy)
    print(f"epoch {epoch}  train loss {train_loss / len(train_set):.4f}  accuracy {share:.4f}")
torch.save(model.state_dict(), args.save)
