"""A recurrent language model by characters, on many workers: paceline run -n 2 recurrent.py [text file]"""

import argparse
import inspect
from pathlib import Path

import torch
from torch import nn, optim

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text", nargs="?", help="a text file; a module of Python's library if none")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--bptt", type=int, default=32, help="characters through which gradients go back")
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=5.0)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", default="recurrent.pt", help="where to save the weights")
args = parser.parse_args()

torch.manual_seed(args.seed)
text = Path(args.text).read_text(encoding="utf-8") if args.text else inspect.getsource(argparse)[:40_000]
number_of = {character: number for number, character in enumerate(sorted(set(text)))}
characters = torch.tensor([number_of[character] for character in text])
cut = len(text) * 9 // 10

train_data = paceline.TokenRows(characters[:cut], args.batch_size, args.bptt)
valid_data = paceline.TokenRows(characters[cut:], args.batch_size, args.bptt)


class RNNModel(nn.Module):
    def __init__(self, alphabet, width=64):
        super().__init__()
        self.embed = nn.Embedding(alphabet, width)
        self.dropout = nn.Dropout(0.1)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.guess = nn.Linear(width, alphabet)

    def forward(self, characters, hidden=None):
        output, hidden = self.lstm(self.dropout(self.embed(characters)), hidden)
        return self.guess(self.dropout(output)), hidden


model = RNNModel(len(number_of))
criterion = nn.CrossEntropyLoss()


def forward(model, batch, hidden):
    data, targets = batch
    output, hidden = model(data, hidden)
    return criterion(output.flatten(0, 1), targets.flatten()), hidden


def train():
    losses = [session.step(batch).loss for batch in session.batches()]
    return sum(losses) / len(losses)


given = {"data": train_data, "batch": args.batch_size, "clip_norm": args.clip}
session = paceline.start(model=model, optimizer=lambda p: optim.SGD(p, lr=args.lr), forward=forward, **given)
print = session.print
for epoch in session.epochs(args.epochs):
    train_loss = train()
    valid_loss = session.evaluate(valid_data)
    print(f"epoch {epoch}  train loss {train_loss:.4f}  validation loss {valid_loss:.4f}")
session.export(args.save)
