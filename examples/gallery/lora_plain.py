"""A small BERT learns a language, then a task with low-rank adapters only, in plain PyTorch: python lora_plain.py"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.data import DataLoader, TensorDataset

WORDS, MASK, LENGTH, WIDTH = 64, 0, 12, 48


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        return self.head(self.encoder(self.words(words) + self.places))


class LoRA(nn.Module):
    """Adds the product of two thin matrices to a frozen weight, at first zero (Hu et al. 2022, arXiv 2106.09685)."""

    def __init__(self, weight, rank=4):
        super().__init__()
        self.down = nn.Parameter(0.1 * torch.randn(rank, weight.shape[1]))
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight):
        return weight + self.up @ self.down


def masked(model, batch):
    """The loss of words that were masked."""
    (words,) = batch
    hidden = torch.rand(words.shape) < 0.2
    outputs = model(words.masked_fill(hidden, MASK))
    return cross_entropy(outputs[hidden], words[hidden], reduction="sum"), hidden.sum()


def task(model, batch):
    """The class of a sentence, read at its first word."""
    return cross_entropy(model(batch[0])[:, 0, :2], batch[1])


def accuracy(model, batch):
    return (model(batch[0])[:, 0, :2].argmax(1) == batch[1]).float().mean()


torch.manual_seed(0)
starts, strides = torch.randint(1, WORDS, (2000, 1)), torch.randint(1, 4, (2000, 1))
sentences = 1 + (starts + strides * torch.arange(LENGTH)) % (WORDS - 1)  # a word follows from those around it
labels = (strides[:, 0] == 2).long()
model = Bert()
loader = DataLoader(TensorDataset(sentences), batch_size=50, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(8):
    mean = 0.0
    for batch in loader:
        optimizer.zero_grad()
        error, count = masked(model, batch)
        loss = error / count
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean += loss.item() / len(loader)
    print(f"language, epoch {epoch}  loss {mean:.4f}")

model.requires_grad_(False)
adapted = [one for block in model.encoder.layers for one in (block.linear1, block.linear2)]
for layer in (*adapted, model.head):
    register_parametrization(layer, "weight", LoRA(layer.weight))
train, test = (TensorDataset(sentences[p], labels[p]) for p in (slice(1600), slice(1600, None)))
loader = DataLoader(train, batch_size=50, shuffle=True)
optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=5e-3)
for epoch in range(5):
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        loss = task(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item() * len(batch[1])
    model.eval()
    with torch.no_grad():
        share = accuracy(model, test[:])
    model.train()
    print(f"task, epoch {epoch}  loss {total / len(train):.4f}  accuracy {share:.4f}")
