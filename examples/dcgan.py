"""A DCGAN that draws handwritten digits, on many workers: paceline run -n 2 dcgan.py"""

import argparse

import torch
from digits_data import read_digits
from torch import nn, optim

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=2e-4)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", default="dcgan.pt", help="where to save the generator's weights")
args = parser.parse_args()

torch.manual_seed(args.seed)
train_set, _ = read_digits([])
NOISE = 16

netG = nn.Sequential(
    nn.ConvTranspose2d(NOISE, 32, 2, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
    nn.Sigmoid(),
)
netD = nn.Sequential(
    nn.Conv2d(1, 16, 4, stride=2, padding=1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(16, 32, 4, stride=2, padding=1),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(32 * 2 * 2, 1),
)
criterion = nn.BCEWithLogitsLoss()


def loss_of(output, label):
    return criterion(output, torch.full_like(output, label))


def draw(count):
    return netG(torch.randn(count, NOISE, 1, 1, device=next(netG.parameters()).device))


optimizerD = optim.Adam(netD.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=args.lr, betas=(args.beta1, 0.999))


def loss_of_D(model, batch):  # real pictures are 1, others 0
    real, _ = batch
    return loss_of(netD(real), 1.0) + loss_of(netD(draw(len(real))), 0.0)


def loss_of_G(model, batch):  # its pictures are to be taken for real ones
    return loss_of(netD(draw(len(batch[0]))), 1.0)


model = nn.ModuleDict({"D": netD, "G": netG})
losses = {"D": loss_of_D, "G": loss_of_G}
optimizers = {"D": optimizerD, "G": optimizerG}
given = {"data": train_set, "batch": args.batch_size}
session = paceline.start(model=model, optimizer=lambda model: optimizers, forward=losses, **given)
for epoch in session.epochs(args.epochs):
    total_D = total_G = 0
    for batch in session.batches():
        total_D += session.step(batch, optimizer="D").loss
        total_G += session.step(batch, optimizer="G").loss
    steps = session.steps_per_epoch
    session.print(f"epoch {epoch}  loss of D {total_D / steps:.4f}  loss of G {total_G / steps:.4f}")
if session.is_main:
    torch.save(netG.state_dict(), args.save)
