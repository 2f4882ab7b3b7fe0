"""An encoder and a decoder with attention sort words by their letters: paceline run -n 3 seq2seq.py"""

from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import paceline

LETTERS, BEGIN, END = 26, 27, 28  # 0 pads


def pad(words):
    """Words of several lengths, what the decoder sees, and what it is to say."""
    return {
        "words": pad_sequence(words, batch_first=True),
        "seen": pad_sequence([torch.tensor([BEGIN, *sorted(word.tolist())]) for word in words], batch_first=True),
        "said": pad_sequence([torch.tensor([*sorted(word.tolist()), END]) for word in words], batch_first=True),
    }


class Translator(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.letters = nn.Embedding(END + 1, width, padding_idx=0)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(2 * width, END + 1)

    def forward(self, words, seen):
        memory, last = self.encoder(self.letters(words))
        states, _ = self.decoder(self.letters(seen), torch.cat([*last], dim=1)[None])
        found, _ = self.attention(states, memory, memory, key_padding_mask=words == 0, need_weights=False)
        return self.head(torch.cat([states, found], dim=2))


def loss(model, batch):
    """The sum over the letters, and their number: a mean over all letters of the batch, however words are shared."""
    outputs, said = model(batch["words"], batch["seen"]), batch["said"]
    return cross_entropy(outputs.transpose(1, 2), said, ignore_index=0, reduction="sum"), (said > 0).sum()


def correct(model, batch):
    """The part of the words whose letters are all right, each given those before."""
    said = batch["said"]
    return ((model(batch["words"], batch["seen"]).argmax(2) == said) | (said == 0)).all(1).float().mean()


torch.manual_seed(0)
words = [torch.randint(1, LETTERS + 1, (3 + number % 6,)) for number in range(2400)]
session = paceline.start(
    model=Translator(),
    optimizer=partial(torch.optim.Adam, lr=4e-3),
    forward=loss,
    data=words[:2000],
    collate=pad,
    batch=50,
    clip_norm=1.0,
    exact=True,
)
for epoch in session.epochs(8):
    mean = sum(session.step(batch).loss for batch in session.batches()) / session.steps_per_epoch
    session.print(f"epoch {epoch}  loss {mean:.4f}  words {session.evaluate(words[2000:], correct):.4f}")
session.print("fingerprint", session.fingerprint())
