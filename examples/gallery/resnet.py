"""A residual network reads handwritten digits: paceline run -n 3 resnet.py"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import paceline

EPOCHS, BATCH = 5, 64


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.skip = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.layers(x) + self.skip(x))


def accuracy(outputs, labels):
    return (outputs.argmax(1) == labels).float().mean()


torch.manual_seed(0)
digits = load_digits()
pictures, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
shuffled = torch.randperm(len(labels))  # they are ordered by writer
pictures, labels = pictures[shuffled], labels[shuffled]
train, test = (
    torch.utils.data.TensorDataset(pictures[part], labels[part]) for part in (slice(1440), slice(1440, None))
)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
)
session = paceline.start(
    model=model,
    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4),
    schedule=partial(OneCycleLR, max_lr=0.2, total_steps=EPOCHS * -(-len(train) // BATCH)),
    loss=nn.functional.cross_entropy,
    data=train,
    batch=BATCH,
    exact=True,
)
for epoch in session.epochs(EPOCHS):
    loss = sum(session.step(batch).loss * batch.samples for batch in session.batches()) / len(train)
    session.print(f"epoch {epoch}  loss {loss:.4f}  accuracy {session.evaluate(test, accuracy):.4f}")
session.print("fingerprint", session.fingerprint())
