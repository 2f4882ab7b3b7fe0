"""What the scripts of these tests train: small models, small data sets, ready-made arguments of ``paceline.start``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline.schedule.balance import LayerCost

Arguments = dict[str, Any]


def tell(**values: object) -> None:
    """One line of JSON for the test."""
    print(json.dumps(values), flush=True)


def measure_alike() -> None:
    """Each layer of a pipeline takes as long as any other, however busy the machine is.

    Else a layer without parameters may seem so slow that it is a stage, with which no state is lost.
    """
    stages: Any = import_module("paceline.strategies.pipeline.stages")
    measure = stages.measure_layers

    def alike(*given: Any) -> list[LayerCost]:
        return [replace(cost, forward=0.001, backward=0.002) for cost in measure(*given)]

    stages.measure_layers = alike


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classes(length: int, features: int = 12, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Vectors and their classes, of which there are 4."""
    values = torch.randn(length, features, generator=_generator(1), dtype=dtype)
    return TensorDataset(values, values[:, :4].argmax(1))


def images(length: int) -> TensorDataset:
    """Small images and their classes."""
    values = torch.randn(length, 2, 6, 6, generator=_generator(2))
    return TensorDataset(values, (values.mean((1, 2, 3)) * 40).long().clamp(-1, 2) + 1)


def numbers(length: int) -> TensorDataset:
    """Vectors and numbers in float64."""
    values = torch.randn(length, 6, generator=_generator(3), dtype=torch.float64)
    return TensorDataset(values, values.sin().sum(1, keepdim=True))


class Sentences(Dataset[torch.Tensor]):
    """Sequences of 10 tokens of which the last ones are padding (0); the lengths go from 2 to 10."""

    def __init__(self, length: int) -> None:
        self._tokens = torch.randint(1, 16, (length, 10), generator=_generator(4))
        for place, row in enumerate(self._tokens):
            row[2 + place * 7 % 9 :] = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, place: int) -> torch.Tensor:
        return self._tokens[place]


def mlp(features: int = 12, outputs: int = 4, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, outputs)).to(dtype)


def convnet() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(16, 4),
    )


class Block(nn.Module):
    """Attention to the tokens before, and two layers."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.first(values)).unsqueeze(1).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        values = values + self.dropout(mixed)
        return values + self.dropout(self.layers(self.second(values)))


class Transformer(nn.Module):
    """Two blocks; the output layer has the weights of the embedding."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.Sequential(Block(8, dropout), Block(8, dropout))
        self.output = nn.Linear(8, 16, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.blocks(self.embedding(tokens)))


def transformer(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(7)
    return Transformer(dropout)


def per_token(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses of all tokens that are no padding, and their number."""
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return losses, (targets != 0).sum()


class Gated(nn.Module):
    """Uses its second layer only if the first feature of the first sample is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output = self.first(values)
        return output + self.second(values) if values[0, 0] > 0 else output


def gated() -> nn.Module:
    torch.manual_seed(8)
    return Gated()


def _cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)


def _of_transformer(**more: Any) -> Callable[[], Arguments]:
    return lambda: {
        "model": transformer(),
        "optimizer": partial(torch.optim.AdamW, lr=3e-3),
        "forward": per_token,
        "data": Sentences(90),
        "batch": 32,
        "clip_norm": 0.5,
        "schedule": _cosine,
        **more,
    }


def _of_mlp(**more: Any) -> Arguments:
    return {
        "model": mlp(),
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "loss": functional.cross_entropy,
        "data": classes(256),
        "batch": 64,
        **more,
    }


CASES: dict[str, Callable[[], Arguments]] = {
    "mlp, momentum": _of_mlp,
    # the last batch has 4 samples: one microbatch, so all workers but one have nothing to do
    "batch norm, dropout, short batch": lambda: {
        "model": convnet(),
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "loss": functional.cross_entropy,
        "data": images(100),
        "batch": 32,
    },
    "transformer, tied weights, clipping, schedule": _of_transformer(),
    "transformer, recomputed, bfloat16": _of_transformer(recompute=[Block], autocast="bfloat16"),
    # 50 samples in 11 microbatches of 4 or 5; then 30 in 7
    "not divisible": lambda: _of_mlp(data=classes(130), batch=50, microbatches=11),
    "dropped last batch": lambda: _of_mlp(data=classes(130), batch=40, drop_last=True),
    "float64": lambda: {
        "model": mlp(6, 1, torch.float64),
        "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "loss": functional.mse_loss,
        "data": numbers(200),
        "batch": 48,
    },
    "layer used sometimes": lambda: _of_mlp(model=gated(), missing_gradient="zero"),
}


class Folded:
    """A metric that depends on the order of the samples, and is no mean."""

    def reset(self) -> None:
        self.value = torch.zeros(())

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        for one in output[:, 0] + target:
            self.value = 0.9 * self.value + one

    def compute(self) -> str:
        return float(self.value).hex()


def train(arguments: Arguments, steps: int = 10) -> dict[str, Any]:
    """Train for some steps; what came out of it."""
    session = paceline.start(**arguments)
    losses = [session.step(batch).loss for batch in session.batches(steps=steps)]
    return {
        "fingerprint": session.fingerprint(),
        "losses": [math.fsum(losses).hex(), losses[-1].hex()],
        "steps": session.position,
        "shared": session._context.world.shared_memory is not None,
    }


def unequal_links() -> None:
    """Let the second machine's link have half the rate of the others."""
    choice: Any = import_module("paceline.comm.reduction.choice")
    measured = choice.measure_links

    def unequal(world: Any) -> list[float]:
        assert all(rate > 0 for rate in measured(world))
        return [1.0, 0.5] + [1.0] * (len(world.hosts) - 2)

    choice._WORTH_MEASURING, choice.measure_links = 0, unequal
