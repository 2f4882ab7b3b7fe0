"""A variational autoencoder of handwritten digits, in plain PyTorch: python vae_plain.py"""

import argparse

import torch
from digits_data import read_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", default="vae.pt", help="where to save the weights")
args = parser.parse_args()

torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"
train_set, test_set = read_digits([])
train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
test_loader = DataLoader(test_set, batch_size=args.batch_size)


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


model = VAE()
model.to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)


def train(epoch):
    model.train()
    train_loss = 0
    for data, _ in train_loader:
        data = data.to(device)
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    print(f"epoch {epoch}  train loss {train_loss / len(train_set):.4f}")


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data, _ in test_loader:
            data = data.to(device)
            recon, mu, logvar = model(data)
            test_loss += loss_function(recon, data, mu, logvar).item()
    test_loss /= len(test_set)
    print(f"epoch {epoch}  test loss {test_loss:.4f}")


for epoch in range(args.epochs):
    train(epoch)
    test(epoch)
torch.save(model.state_dict(), args.save)
