"""Handwritten digits with a convolution net, in plain PyTorch: python convnet_plain.py [MNIST folder]"""

import argparse
import math

import torch
from digits_data import read_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data", nargs="*", help="MNIST's folder, or its two files; scikit-learn's digits if none")
parser.add_argument("--epochs", type=int, default=5)
arguments = parser.parse_args()


def convolution(inputs, outputs):
    """Each halves the side of the picture."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def accuracy(output, target):
    return (output.argmax(dim=1) == target).float().mean()


def evaluate(model, data, metric):
    model.eval()
    with torch.no_grad():
        total = sum(metric(model(x), y).item() * len(y) for x, y in DataLoader(data, batch_size=256))
    model.train()
    return total / len(data)


torch.manual_seed(0)
train, test = read_digits(arguments.data, shift=1)
steps = arguments.epochs * math.ceil(len(train) / 64)
model = nn.Sequential(
    convolution(1, 16),
    convolution(16, 32),
    nn.Flatten(),
    nn.Linear(32 * (train.side // 4) ** 2, 128),
    nn.ReLU(),
    nn.Dropout(0.25),
    nn.Linear(128, 10),
)

loader = DataLoader(train, batch_size=64, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = CosineAnnealingLR(optimizer, T_max=steps)
for epoch in range(1, arguments.epochs + 1):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
    share = evaluate(model, test, accuracy)
    print(f"epoch {epoch}  loss {loss:.4f}  test accuracy {share:.2%}")
