"""Small models and data sets, ready-made arguments of ``paceline.start``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

Arguments = dict[str, Any]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classes(length: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Vectors and their classes, of which there are 4."""
    values = torch.randn(length, 12, generator=generator(1), dtype=dtype)
    return TensorDataset(values, values[:, :4].argmax(1))


def images(length: int) -> TensorDataset:
    """Small images and their classes."""
    values = torch.randn(length, 2, 6, 6, generator=generator(2))
    return TensorDataset(values, (values.mean((1, 2, 3)) * 40).long().clamp(-1, 2) + 1)


def tokens(length: int) -> TensorDataset:
    """Sequences of 6 tokens, and for each the token that follows."""
    values = torch.randint(0, 16, (length, 7), generator=generator(3))
    return TensorDataset(values[:, :-1], values[:, 1:])


def loss_of_tokens(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum over the tokens that count, and their number, which differs between microbatches."""
    counts = target > 2
    losses = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return losses[counts.flatten()].sum(), counts.sum()


class Block(nn.Module):
    """Attention to the tokens before, and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.first(values)).unsqueeze(1).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        values = values + self.dropout(mixed)
        return values + self.dropout(self.layers(self.second(values)))


class Transformer(nn.Module):
    """Two blocks; the output layer has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(16, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.norm, self.output = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.embedding(values) + self.place(torch.arange(values.shape[1]))
        for block in self.blocks:
            values = block(values)
        return self.output(self.norm(values))


class Gated(nn.Module):
    """Uses its second layer only if the first feature of the first sample is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output = self.first(values)
        return output + self.second(values) if values[0, 0] > 0 else output


def _mlp(**more: Any) -> Arguments:
    """Five layers that can be cut; SGD with momentum; batches that divide the data."""
    dtype = more.pop("dtype", torch.float32)
    layers = [nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
    return {
        "model": nn.Sequential(*layers).to(dtype),
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "loss": functional.cross_entropy,
        "data": classes(192, dtype),
        "batch": 64,
        **more,
    }


def _convnet() -> Arguments:
    """Batch norm and dropout; the last batch of an epoch has 4 samples: one microbatch."""
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2)]
    layers += [nn.Conv2d(4, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return {
        "model": nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(16, 4)),
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "loss": functional.cross_entropy,
        "data": images(100),
        "batch": 32,
    }


def _transformer() -> Arguments:
    """Tied weights, clipping, a schedule, a mean over tokens; the last batch of an epoch is short."""
    return {
        "model": Transformer(),
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "schedule": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10),
        "loss": loss_of_tokens,
        "data": tokens(68),
        "batch": 24,
        "clip_norm": 0.5,
    }


MODELS: dict[str, Callable[[], Arguments]] = {
    "mlp": _mlp,
    "convnet": _convnet,
    "transformer": _transformer,
    "double": lambda: _mlp(dtype=torch.float64),
    "gated": lambda: _mlp(model=Gated(), missing_gradient="zero"),
    "indivisible": lambda: _mlp(data=classes(130), batch=50, microbatches=11),
    "dropped": lambda: _mlp(data=classes(130), batch=40, drop_last=True),
}


def arguments_of(model: str, settings: dict[str, Any]) -> Arguments:
    """The arguments of ``paceline.start``; the weights are the same each time."""
    torch.manual_seed(0)
    return {**MODELS[model](), **settings}
