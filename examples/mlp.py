"""Handwritten digits with two layers, on many workers: paceline run -n 4 mlp.py [MNIST folder]"""

import argparse

import torch
from digits_data import read_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data", nargs="*", help="MNIST's folder, or its two files; scikit-learn's digits if none")
parser.add_argument("--epochs", type=int, default=10)
arguments = parser.parse_args()


def accuracy(output, target):
    return (output.argmax(dim=1) == target).float().mean()


torch.manual_seed(0)
train, test = read_digits(arguments.data)
model = nn.Sequential(nn.Flatten(), nn.Linear(train.side**2, 128), nn.ReLU(), nn.Linear(128, 10))

session = paceline.start(model=model, optimizer=AdamW, loss=cross_entropy, data=train, batch=64)
for batch in session.batches(epochs=arguments.epochs):
    session.step(batch)
share = session.evaluate(test, accuracy)
fingerprint = session.fingerprint()
if session.rank == 0:
    print(f"test accuracy {share:.2%}")
    print(f"fingerprint {fingerprint}")
