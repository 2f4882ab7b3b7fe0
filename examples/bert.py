"""A small BERT learns whether a word is in a text, on many workers: paceline run -n 2 bert.py"""

import argparse
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", default="bert.pt", help="where to save the weights")
args = parser.parse_args()

torch.manual_seed(args.seed)
WORDS, QUESTION = 200, 7


def example(number):
    """A row as a tokenized data set of ``datasets`` has it."""
    words = [1, *torch.randint(8, WORDS, (8 + number % 9,)).tolist()]
    if number % 2:
        words[1 + number % 8] = QUESTION
    return {"input_ids": words, "labels": number % 2}


def pad(rows):
    """Pads to the longest row, as the collator of a tokenizer does."""
    ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


class Bert(nn.Module):
    """Its results have a loss if it is given labels, as those of models of Hugging Face."""

    def __init__(self, width=32):
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=0)
        self.places = nn.Embedding(32, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(width, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        logits = self.classifier(x[:, 0])
        loss = None if labels is None else cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


def loss_of(model, batch):
    return model(**batch).loss


def accuracy(model, batch):
    return (model(**batch).logits.argmax(dim=-1) == batch["labels"]).float().mean()


train, test = [example(number) for number in range(480)], [example(number) for number in range(120)]
model = Bert()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
given = {"data": train, "collate": pad, "batch": args.batch}
session = paceline.start(model=model, optimizer=lambda model: optimizer, forward=loss_of, **given)
for epoch in session.epochs(args.epochs):
    train_loss = 0
    for batch in session.batches():
        train_loss += session.step(batch).loss * batch.samples
    share = session.evaluate(test, accuracy)
    session.print(f"epoch {epoch}  train loss {train_loss / len(train):.4f}  accuracy {share:.4f}")
session.export(args.save)
