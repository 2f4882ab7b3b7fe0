"""A small BERT learns a language, then a task with low-rank adapters only: paceline run -n 3 lora.py"""

from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrize import register_parametrization

import paceline

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
given = {"batch": 50, "exact": True, "clip_norm": 1.0}
language = torch.utils.data.TensorDataset(sentences)
session = paceline.start(
    model=model, optimizer=partial(torch.optim.AdamW, lr=3e-3), forward=masked, data=language, **given
)
for epoch in session.epochs(8):
    mean = sum(session.step(batch).loss for batch in session.batches()) / session.steps_per_epoch
    session.print(f"language, epoch {epoch}  loss {mean:.4f}")
model.load_state_dict(session.model_state())

model.requires_grad_(False)
adapted = [one for block in model.encoder.layers for one in (block.linear1, block.linear2)]
for layer in (*adapted, model.head):
    register_parametrization(layer, "weight", LoRA(layer.weight))
train, test = (torch.utils.data.TensorDataset(sentences[p], labels[p]) for p in (slice(1600), slice(1600, None)))
session = paceline.start(model=model, optimizer=partial(torch.optim.AdamW, lr=5e-3), forward=task, data=train, **given)
for epoch in session.epochs(5):
    mean = sum(session.step(batch).loss * batch.samples for batch in session.batches()) / len(train)
    session.print(f"task, epoch {epoch}  loss {mean:.4f}  accuracy {session.evaluate(test, accuracy):.4f}")
session.print("fingerprint", session.fingerprint())
