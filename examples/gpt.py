"""A small GPT that reads a text by characters, on many workers: paceline run -n 2 gpt.py [text file]"""

import argparse
import inspect
import math
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text", nargs="?", help="a text file; a module of Python's library if none")
parser.add_argument("--epochs", type=int, default=2, help="passes over the text")
arguments = parser.parse_args()

CONTEXT, LAYERS, HEADS, WIDTH, DROPOUT = 64, 4, 4, 128, 0.05  # 0.8 million parameters
BATCH, RATE, WARM_UP = 32, 3e-3, 50


class Windows(torch.utils.data.Dataset):
    """Pairs (characters, the characters one place further): one for each stretch of the text.

    With ``shift`` a window starts at a random place of its stretch, so every epoch shows other windows.
    """

    def __init__(self, characters, shift):
        self.characters = characters
        self.shift = shift

    def __len__(self):
        return (len(self.characters) - 1) // CONTEXT - self.shift

    def __getitem__(self, index):
        start = index * CONTEXT
        if self.shift:
            start += torch.randint(CONTEXT, ()).item()
        window = self.characters[start : start + CONTEXT + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Attention to the characters so far, then two layers for each of them; both add to what came in."""

    def __init__(self):
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.to_heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.from_heads = nn.Linear(WIDTH, WIDTH)
        self.before_layers = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x):
        x = x + self.dropout(self.from_heads(self.attention(self.before_attention(x))))
        return x + self.dropout(self.narrow(gelu(self.widen(self.before_layers(x)))))

    def attention(self, x):
        batch, length, _ = x.shape
        heads = self.to_heads(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, WIDTH)


class GPT(nn.Module):
    def __init__(self, alphabet):
        super().__init__()
        self.embed = nn.Embedding(alphabet, WIDTH)
        self.embed_place = nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.guess = nn.Linear(WIDTH, alphabet, bias=False)
        # Tied: a character is guessed by the vector that stands for it.
        self.guess.weight = self.embed.weight
        self.apply(self.initial)

    def initial(self, module):
        # Tied vectors must be short, or the first guesses are far too sure.
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, characters):
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.dropout(self.embed(characters) + self.embed_place(places))
        return self.guess(self.norm(self.blocks(x)))


def loss_of(output, target):
    """In nats for each character."""
    return cross_entropy(output.flatten(0, 1), target.flatten())


def factor(step):
    """Of the learning rate: up in a line, then down along a cosine to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP))


text = Path(arguments.text).read_text(encoding="utf-8") if arguments.text else inspect.getsource(argparse)
number_of = {character: number for number, character in enumerate(sorted(set(text)))}
characters = torch.tensor([number_of[character] for character in text])
cut = len(text) * 9 // 10
train, valid = Windows(characters[:cut], shift=True), Windows(characters[cut:], shift=False)
steps = arguments.epochs * math.ceil(len(train) / BATCH)
torch.manual_seed(0)
model = GPT(len(number_of))

optimizer = partial(torch.optim.AdamW, lr=RATE, betas=(0.9, 0.99))
schedule = partial(LambdaLR, lr_lambda=factor)
session = paceline.start(
    model=model, optimizer=optimizer, schedule=schedule, clip_norm=1.0, loss=loss_of, data=train, batch=BATCH
)
for batch in session.batches(epochs=arguments.epochs):
    loss = session.step(batch).loss
    if batch.last:
        nats = session.evaluate(valid)  # no metric: the loss
        session.print(f"epoch {batch.epoch + 1}  loss {loss:.4f}  validation loss {nats:.4f}")
session.print(f"fingerprint {session.fingerprint()}")
