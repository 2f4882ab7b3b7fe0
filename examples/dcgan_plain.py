"""A DCGAN that draws handwritten digits, in plain PyTorch: python dcgan_plain.py"""

import argparse

import torch
from digits_data import read_digits
from torch import nn, optim
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=2e-4)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", default="dcgan.pt", help="where to save the generator's weights")
args = parser.parse_args()

torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"
train_set, _ = read_digits([])
loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
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
netG.to(device)
netD.to(device)
criterion = nn.BCEWithLogitsLoss()


def loss_of(output, label):
    return criterion(output, torch.full_like(output, label))


def draw(count):
    return netG(torch.randn(count, NOISE, 1, 1, device=next(netG.parameters()).device))


optimizerD = optim.Adam(netD.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
for epoch in range(args.epochs):
    total_D = total_G = 0
    for real, _ in loader:
        real = real.to(device)
        # the discriminator: real pictures are 1, others 0
        optimizerD.zero_grad()
        errD = loss_of(netD(real), 1.0) + loss_of(netD(draw(len(real)).detach()), 0.0)
        errD.backward()
        optimizerD.step()
        # the generator: its pictures are to be taken for real ones
        optimizerG.zero_grad()
        errG = loss_of(netD(draw(len(real))), 1.0)
        errG.backward()
        optimizerG.step()
        total_D += errD.item()
        total_G += errG.item()
    print(f"epoch {epoch}  loss of D {total_D / len(loader):.4f}  loss of G {total_G / len(loader):.4f}")
torch.save(netG.state_dict(), args.save)
