"""A variational autoencoder of handwritten digits, on many workers: paceline run -n 2 vae.py"""

import argparse

import torch
from digits_data import read_digits
from torch import nn, optim
from torch.nn import functional as F

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", default="vae.pt", help="where to save the weights")
args = parser.parse_args()

torch.manual_seed(args.seed)
train_set, test_set = read_digits([])


class VAE(nn.Module):
    def __init__(self, pixels=64, hidden=128, latent=8):
        super().__init__()
        self.hidden = nn.Linear(pixels, hidden)
        self.mean = nn.Linear(hidden, latent)
        self.log_variance = nn.Linear(hidden, latent)
        self.decode = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def forward(self, x):
        h = F.relu(self.hidden(x.flatten(1)))
        mu, logvar = self.mean(h), self.log_variance(h)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu) if self.training else mu
        return self.decode(z), mu, logvar


def loss_function(recon, x, mu, logvar):
    """The sum over the samples and pixels."""
    error = F.binary_cross_entropy_with_logits(recon, x.flatten(1), reduction="sum")
    return error - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def forward(model, batch):
    recon, mu, logvar = model(batch[0])
    return loss_function(recon, batch[0], mu, logvar), len(batch[0])  # a mean over the samples


model = VAE()
session = paceline.start(model=model, optimizer=optim.Adam, forward=forward, data=train_set, batch=args.batch_size)
print = session.print


def train(epoch):
    train_loss = sum(session.step(batch).loss * batch.samples for batch in session.batches())
    print(f"epoch {epoch}  train loss {train_loss / len(train_set):.4f}")


def test(epoch):
    test_loss = session.evaluate(test_set)
    print(f"epoch {epoch}  test loss {test_loss:.4f}")


for epoch in session.epochs(args.epochs):
    train(epoch)
    test(epoch)
session.export(args.save)
