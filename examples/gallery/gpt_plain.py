"""A small GPT learns to write as a text does, letter by letter, in plain PyTorch: python gpt_plain.py"""

import inspect
import itertools
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

LENGTH, WIDTH, HEADS, LAYERS, STEPS = 64, 96, 4, 3, 150


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        heads = self.inward(self.norms[0](x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        seen = scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.outward(seen.transpose(1, 2).flatten(2))
        return x + self.wide(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, letters, bias=False)
        self.head.weight = self.letters.weight  # tied
        for embedding in (self.letters, self.places):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, letters):
        return self.head(self.blocks(self.letters(letters) + self.places.weight[: letters.shape[1]]))


def loss_of(outputs, targets):
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


torch.manual_seed(0)
text = Path(sys.argv[1]).read_text(encoding="utf-8") if len(sys.argv) > 1 else inspect.getsource(inspect)
letters = sorted({*text})
codes = torch.tensor([letters.index(one) for one in text])
windows = codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
model = GPT(len(letters))
loader = DataLoader(TensorDataset(windows[:, :-1], windows[:, 1:]), batch_size=32, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
epochs = itertools.chain.from_iterable(itertools.repeat(loader))
for step, (inputs, targets) in zip(range(STEPS), epochs, strict=False):
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % 30 == 29:
        print(f"step {step}  loss {loss:.4f}")
