"""A diffusion model learns a ring of points and draws new ones, in plain PyTorch: python diffusion_plain.py"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

LEVELS = 50
NOISE = torch.linspace(1e-4, 0.15, LEVELS)  # variance that each level adds
KEPT = torch.cumprod(1 - NOISE, 0)


class Denoiser(nn.Module):
    """Predicts the noise in a point, given the level."""

    def __init__(self, width=128):
        super().__init__()
        self.level = nn.Embedding(LEVELS, width)
        self.point = nn.Linear(2, width)
        self.rest = nn.Sequential(
            nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, points, levels):
        return self.rest(self.point(points) + self.level(levels))


def loss_of(model, batch):
    """The error of the predicted noise, each point at a random level (Ho et al. 2020, arXiv 2006.11239)."""
    (points,) = batch
    levels, noise = torch.randint(LEVELS, (len(points),)), torch.randn_like(points)
    kept = KEPT[levels, None]
    return (model(kept.sqrt() * points + (1 - kept).sqrt() * noise, levels) - noise).square().mean()


@torch.no_grad()
def draw(model, count):
    """New points from noise, level by level (DDIM, Song et al. 2021, arXiv 2010.02502)."""
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(1))
    for level in reversed(range(LEVELS)):
        noise, kept = model(points, torch.full((count,), level)), KEPT[level]
        clean = (points - (1 - kept).sqrt() * noise) / kept.sqrt()
        before = KEPT[level - 1] if level else torch.tensor(1.0)
        points = before.sqrt() * clean + (1 - before).sqrt() * noise
    return points


torch.manual_seed(0)
angles = torch.rand(2000) * 2 * torch.pi
ring = torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(2000, 2)
model = Denoiser()
loader = DataLoader(torch.utils.data.TensorDataset(ring), batch_size=100, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
for epoch in range(80):
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        averaged.update_parameters(model)
        total += loss.item() * len(batch[0])
    if epoch % 10 == 9:
        print(f"epoch {epoch}  loss {total / len(ring):.4f}")
radii = draw(averaged, 200).norm(dim=1)
print(f"new points: radius {radii.mean():.3f} +- {radii.std():.3f} (the ring has 1.000 +- 0.05)")
