"""The models that the benchmarks train, and their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

CONTEXT = 128
CHARACTERS = 256


class Block(nn.Module):
    """Attention and a perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer over characters."""

    def __init__(self, width: int, blocks: int, heads: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.embed(characters) + self.place.weight[: characters.shape[1]]
        return self.head(self.norm(self.blocks(x)))


@dataclass(frozen=True)
class Task:
    """A model to train: how to build it, its data, and the size of a microbatch in samples."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    microbatch: int
    per_worker: int


def _images(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 784), torch.randint(10, (count,)))


def _texts(count: int) -> TensorDataset:
    text = torch.randint(CHARACTERS, (count, CONTEXT + 1))
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def loss_of_characters(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


TASKS = {
    "mlp-2M": Task("mlp-2M", _perceptron, _images, functional.cross_entropy, microbatch=64, per_worker=4),
    "gpt-10M": Task("gpt-10M", lambda: GPT(320, 8), _texts, loss_of_characters, microbatch=4, per_worker=2),
    "gpt-25M": Task("gpt-25M", lambda: GPT(512, 8), _texts, loss_of_characters, microbatch=4, per_worker=2),
}
