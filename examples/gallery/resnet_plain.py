"""A residual network reads handwritten digits, in plain PyTorch: python resnet_plain.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

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
loader = DataLoader(train, batch_size=BATCH, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
schedule = OneCycleLR(optimizer, max_lr=0.2, total_steps=EPOCHS * len(loader))
for epoch in range(EPOCHS):
    total = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.item() * len(targets)
    model.eval()
    with torch.no_grad():
        share = accuracy(model(test[:][0]), test[:][1])
    model.train()
    print(f"epoch {epoch}  loss {total / len(train):.4f}  accuracy {share:.4f}")
