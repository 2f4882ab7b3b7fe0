"""Handwritten digits with two layers, in plain PyTorch: python mlp_plain.py [MNIST folder]"""

import argparse

import torch
from digits_data import read_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data", nargs="*", help="MNIST's folder, or its two files; scikit-learn's digits if none")
parser.add_argument("--epochs", type=int, default=10)
arguments = parser.parse_args()


def accuracy(output, target):
    return (output.argmax(dim=1) == target).float().mean()


def evaluate(model, data, metric):
    model.eval()
    with torch.no_grad():
        total = sum(metric(model(x), y).item() * len(y) for x, y in DataLoader(data, batch_size=256))
    model.train()
    return total / len(data)


torch.manual_seed(0)
train, test = read_digits(arguments.data)
model = nn.Sequential(nn.Flatten(), nn.Linear(train.side**2, 128), nn.ReLU(), nn.Linear(128, 10))

loader = DataLoader(train, batch_size=64, shuffle=True)
optimizer = AdamW(model.parameters())
for _ in range(arguments.epochs):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
share = evaluate(model, test, accuracy)
print(f"test accuracy {share:.2%}")
