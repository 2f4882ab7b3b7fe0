"""A network finds zero to four squares in a picture, in plain PyTorch: python detection_plain.py"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, l1_loss
from torch.utils.data import DataLoader

SIDE, CELL = 32, 4
CELLS = SIDE // CELL


def scene():
    """A noisy picture and its boxes: a tensor with a row (row, column, size) of each, in pixels."""
    number = int(torch.randint(5, ()))
    boxes = [(*torch.randint(4, SIDE - 4, (2,)).tolist(), int(torch.randint(3, 9, ()))) for _ in range(number)]
    picture = 0.3 * torch.randn(1, SIDE, SIDE)
    for row, column, size in boxes:
        picture[0, row - size // 2 : row + (size + 1) // 2, column - size // 2 : column + (size + 1) // 2] += 1
    return picture, torch.tensor(boxes, dtype=torch.long).view(-1, 3)


def together(scenes):
    """Pictures, and lists of boxes, which have other lengths in each picture."""
    return {"pictures": torch.stack([picture for picture, _ in scenes]), "boxes": [boxes for _, boxes in scenes]}


def targets(boxes):
    """For each cell, whether a centre is in it, and the size of that box."""
    centres, sizes = torch.zeros(len(boxes), CELLS, CELLS), torch.zeros(len(boxes), CELLS, CELLS)
    for at, of_picture in enumerate(boxes):
        rows, columns, values = of_picture.unbind(1)
        centres[at, rows // CELL, columns // CELL] = 1
        sizes[at, rows // CELL, columns // CELL] = values / SIDE
    return centres, sizes


def loss_of(model, batch):
    """The sum of errors, and the number of boxes with one for each picture, over which the whole batch is averaged."""
    centres, sizes = targets(batch["boxes"])
    found, wide = model(batch["pictures"]).unbind(1)
    error = binary_cross_entropy_with_logits(found, centres, reduction="sum")
    error = error + 20 * l1_loss(wide[centres > 0], sizes[centres > 0], reduction="sum")
    return error, centres.sum() + len(centres)


def recall(model, batch):
    """The part of the centres that are found."""
    centres, _ = targets(batch["boxes"])
    found = model(batch["pictures"])[:, 0] > 0
    return (found & (centres > 0)).sum(), centres.sum()


torch.manual_seed(0)
train, test = [scene() for _ in range(800)], [scene() for _ in range(200)]
widths = (1, 16, 1), (16, 32, 2), (32, 48, 2), (48, 48, 1)
layers = [
    nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(4, after), nn.ReLU())
    for before, after, stride in widths
]
model = nn.Sequential(*layers, nn.Conv2d(48, 2, 1))
loader = DataLoader(train, batch_size=32, shuffle=True, collate_fn=together)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(8):
    mean = 0.0
    for batch in loader:
        optimizer.zero_grad()
        error, count = loss_of(model, batch)
        loss = error / count
        loss.backward()
        optimizer.step()
        mean += loss.item() / len(loader)
    model.eval()
    with torch.no_grad():
        found, centres = recall(model, together(test))
    model.train()
    print(f"epoch {epoch}  loss {mean:.4f}  found {found / centres:.4f}")
