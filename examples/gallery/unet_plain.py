"""A U-Net finds the pixels of discs in noise, in plain PyTorch: python unet_plain.py"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate, max_pool2d
from torch.utils.data import DataLoader

SIDE = 32


def picture():
    """A noisy picture, and which of its pixels are in one of two discs."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    mask = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    for _ in range(2):
        row, column, radius = torch.randint(4, SIDE - 4, ()), torch.randint(4, SIDE - 4, ()), torch.randint(3, 7, ())
        mask |= (rows - row) ** 2 + (columns - column) ** 2 < radius**2
    return (mask + torch.randn(SIDE, SIDE))[None], mask[None].float()


def block(before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU())


class UNet(nn.Module):
    """Down to a quarter of the side and up again; each level up also sees the one that went down."""

    def __init__(self, width=8):
        super().__init__()
        self.down = nn.ModuleList([block(1, width), block(width, 2 * width)])
        self.bottom = block(2 * width, 4 * width)
        self.up = nn.ModuleList([block(6 * width, 2 * width), block(3 * width, width)])
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        seen = []
        for layers in self.down:
            x = layers(x)
            seen.append(x)
            x = max_pool2d(x, 2)
        x = self.bottom(x)
        for layers in self.up:
            x = layers(torch.cat([interpolate(x, scale_factor=2), seen.pop()], dim=1))
        return self.last(x)


def overlap(outputs, masks):
    """Intersection over union."""
    found, wanted = outputs > 0, masks > 0
    return (found & wanted).sum() / (found | wanted).sum().clamp(min=1)


torch.manual_seed(0)
pictures, masks = map(torch.stack, zip(*(picture() for _ in range(480)), strict=True))
train, test = (torch.utils.data.TensorDataset(pictures[part], masks[part]) for part in (slice(400), slice(400, None)))
model = UNet()
loader = DataLoader(train, batch_size=16, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for epoch in range(5):
    total = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(targets)
    model.eval()
    with torch.no_grad():
        share = overlap(model(test[:][0]), test[:][1])
    model.train()
    print(f"epoch {epoch}  loss {total / len(train):.4f}  overlap {share:.4f}")
