"""A vision transformer reads handwritten digits by patches of 2 x 2 pixels, in plain PyTorch: python vit_plain.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader


class ViT(nn.Module):
    def __init__(self, side=8, patch=2, width=48, layers=3):
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn((side // patch) ** 2 + 1, width))
        self.kind = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, pictures):
        patches = self.patches(pictures).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.kind.expand(len(pictures), -1, -1), patches], dim=1) + self.places
        return self.head(self.encoder(tokens)[:, 0])


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
model = ViT()
loader = DataLoader(train, batch_size=64, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
for epoch in range(8):
    total = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item() * len(targets)
    model.eval()
    with torch.no_grad():
        share = accuracy(model(test[:][0]), test[:][1])
    model.train()
    print(f"epoch {epoch}  loss {total / len(train):.4f}  accuracy {share:.4f}")
