"""Handwritten digits with a convolution net, on many workers: paceline run -n 4 convnet.py [MNIST folder]"""

import argparse
import math
from functools import partial

import torch
from digits_data import read_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

import paceline

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

optimizer = partial(torch.optim.AdamW, lr=2e-3)
schedule = partial(CosineAnnealingLR, T_max=steps)
session = paceline.start(model=model, optimizer=optimizer, schedule=schedule, loss=cross_entropy, data=train, batch=64)
for batch in session.batches(epochs=arguments.epochs):
    loss = session.step(batch).loss
    if batch.last:
        share = session.evaluate(test, accuracy)
        session.print(f"epoch {batch.epoch + 1}  loss {loss:.4f}  test accuracy {share:.2%}")
session.print(f"fingerprint {session.fingerprint()}")
