"""Handwritten digits with a convolution net, on many workers: paceline run -n 2 images.py"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from digits_data import read_digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", default="images.pt", help="where to save the weights")
args = parser.parse_args()

torch.manual_seed(args.seed)
train_set, test_set = read_digits([])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(16 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(F.relu(self.fc1(x.flatten(1))))
        return self.fc2(x)


model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
scheduler = partial(StepLR, step_size=-(-len(train_set) // args.batch_size), gamma=0.7)  # in steps
given = {"data": train_set, "batch": args.batch_size, "schedule": scheduler}
session = paceline.start(model=model, optimizer=lambda model: optimizer, loss=criterion, **given)
print = session.print


def accuracy(outputs, targets):
    return (outputs.argmax(dim=1) == targets).float().mean()


def train(epoch):
    train_loss = 0
    for batch in session.batches():
        train_loss += session.step(batch).loss * batch.samples
    print(f"epoch {epoch}  train loss {train_loss / len(train_set):.4f}")


def test(epoch):
    test_loss, correct = session.evaluate(test_set, {"loss": None, "accuracy": accuracy}).values()
    print(f"epoch {epoch}  test loss {test_loss:.4f}  accuracy {correct:.4f}")


for epoch in session.epochs(args.epochs):
    train(epoch)
    test(epoch)
session.export(args.save)
