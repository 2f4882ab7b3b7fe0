"""An encoder and a decoder with attention sort words by their letters, in plain PyTorch: python seq2seq_plain.py"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

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


def loss_of(model, batch):
    """The sum over the letters, and their number: a mean over all letters of the batch, however words are shared."""
    outputs, said = model(batch["words"], batch["seen"]), batch["said"]
    return cross_entropy(outputs.transpose(1, 2), said, ignore_index=0, reduction="sum"), (said > 0).sum()


def correct(model, batch):
    """The part of the words whose letters are all right, each given those before."""
    said = batch["said"]
    return ((model(batch["words"], batch["seen"]).argmax(2) == said) | (said == 0)).all(1).float().mean()


torch.manual_seed(0)
words = [torch.randint(1, LETTERS + 1, (3 + number % 6,)) for number in range(2400)]
model = Translator()
loader = DataLoader(words[:2000], batch_size=50, shuffle=True, collate_fn=pad)
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for epoch in range(8):
    mean = 0.0
    for batch in loader:
        optimizer.zero_grad()
        error, letters = loss_of(model, batch)
        loss = error / letters
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean += loss.item() / len(loader)
    model.eval()
    with torch.no_grad():
        share = correct(model, pad(words[2000:]))
    model.train()
    print(f"epoch {epoch}  loss {mean:.4f}  words {share:.4f}")
