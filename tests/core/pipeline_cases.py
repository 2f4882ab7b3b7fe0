"""What the scripts of the pipeline tests train: models that are cut in many ways."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from subjects import Arguments, Block, classes, convnet, images
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline


def tokens(length: int) -> TensorDataset:
    """Sequences of 6 tokens, and for each the token that follows."""
    values = torch.randint(0, 16, (length, 7), generator=torch.Generator().manual_seed(9))
    return TensorDataset(values[:, :-1], values[:, 1:])


def of_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean loss over all tokens."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def of_counted_tokens(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over the tokens that count, and how many these are: not as many as there are samples."""
    counts = target > 2
    losses = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return losses[counts.flatten()].sum(), counts.sum()


class Tied(nn.Module):
    """The output layer has the weights of the embedding; a position is added to each token."""

    def __init__(self, blocks: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(16, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(Block(8, dropout) for _ in range(blocks))
        self.norm, self.output = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.embedding(values) + self.place(torch.arange(values.shape[1]))
        for block in self.blocks:
            values = block(values)
        return self.output(self.norm(values))


class Skips(nn.Module):
    """What early layers make is used again by late ones; one of them is trained by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen, self.head = nn.Linear(8, 8), nn.Linear(16, 4)
        self.dropout, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(8)
        self.frozen.requires_grad_(requires_grad=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        early = self.first(values).tanh()
        middle = self.norm(self.second(early)) + self.dropout(early)
        late = self.third(middle).relu() + self.frozen(early) * self.scale
        return self.head(torch.cat((late, early), 1))


class Decoder(nn.Module):
    """Attends from one branch to another; where it is cut only the other one comes from the stage before."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.query, self.own = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values.unflatten(1, (3, 4))
        memory = self.memory(values)
        query = self.own(self.query(values))
        return self.head((query + self.attention(query, memory, memory, need_weights=False)[0]).flatten(1))


class Twice(nn.Module):
    """Gives its input and what it made of it, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, values: torch.Tensor) -> Any:
        made = self.layer(values).tanh()
        return {"made": made, "also": (values, (made > 0).long())}


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, values: Any) -> torch.Tensor:
        kept, signs = values["also"]
        return self.layer(values["made"]) + kept * signs


class Noise(nn.Module):
    """Draws from the generators of Python, NumPy and torch while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.layer(values)
        drawn = random.gauss(0, 0.1) + float(np.random.standard_normal()) * 0.1
        return self.layer(values * (1 + drawn)) + 0.1 * torch.rand(())


class Shifting(nn.Module):
    """Changes its input."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.add_(1.0)


class Turned(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.transpose(1, 2)


class Spread(nn.Module):
    """Gives every second number, and the mean, which is the same for each place."""

    def forward(self, values: torch.Tensor) -> Any:
        return values[..., ::2], values.mean(1, keepdim=True).expand(-1, values.shape[1], -1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.LSTM(16, 16, batch_first=True)

    def forward(self, values: Any) -> torch.Tensor:
        some, mean = values
        return self.second(self.first(some) * mean)[0]


def _cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(10)
    return make()


def _of_tied(**more: Any) -> Arguments:
    return {
        "model": _seeded(Tied),
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "loss": of_tokens,
        "data": tokens(68),
        "batch": 32,  # then 4 samples in 1 microbatch
        "clip_norm": 0.5,
        "schedule": _cosine,
        **more,
    }


def _of_classes(model: nn.Module, **more: Any) -> Arguments:
    return {
        "model": model,
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "loss": functional.cross_entropy,
        "data": classes(73),
        "batch": 32,
        **more,
    }


def _of_images(**more: Any) -> Arguments:
    return {
        "model": convnet(),
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "loss": functional.cross_entropy,
        "data": images(68),
        "batch": 32,
        **more,
    }


def _list() -> nn.Module:
    middle = [nn.Linear(12, 12), nn.Dropout(0.2)]
    return nn.Sequential(Noise(), Twice(), Joined(), *middle, Twice(), Joined(), Noise(), nn.Linear(12, 4))


def _shifted() -> nn.Module:
    return nn.Sequential(Shifting(), nn.Linear(12, 12), Shifting(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))


def _strided() -> nn.Module:
    first = [nn.Linear(8, 16), Turned(), nn.Linear(33, 33), nn.Tanh(), Turned()]
    return nn.Sequential(*first, Spread(), Recurrent(), Turned(), nn.Linear(33, 33), Turned(), nn.Linear(16, 4))


def _rows(length: int) -> TensorDataset:
    drawn = torch.randn(length, 33, 12, generator=torch.Generator().manual_seed(11))
    return TensorDataset(drawn[..., :8].contiguous(), drawn[..., 8:].contiguous())


def _of_many_uses() -> nn.Module:
    """One weight in five layers: 1, 3, 5, 7, 9."""
    layers = [nn.Linear(12, 12) for _ in range(6)]
    for layer in layers[2:]:
        layer.weight = layers[1].weight
    blocks = [block for layer in layers for block in (layer, nn.Tanh())]
    return nn.Sequential(blocks[0], *blocks[2:], nn.Linear(12, 4))


# Batches of 32 samples in 8 microbatches; the last one of an epoch is shorter.
CUT: dict[str, Callable[[], Arguments]] = {
    "counted tokens": lambda: _of_tied(loss=of_counted_tokens, batch=24),  # 20 in the last batch
    # then 6 samples in 2 microbatches
    "tied weights": _of_tied,
    "bfloat16": lambda: _of_tied(autocast="bfloat16"),
    # then 4 samples in 1 microbatch
    "batch norm": _of_images,
    # fewer than workers; then 4 samples in 1 microbatch
    "two microbatches": lambda: _of_images(microbatches=2),
    # then 9 samples in 3 microbatches
    "skips": lambda: _of_classes(_seeded(Skips)),
    "decoder": lambda: _of_classes(_seeded(Decoder)),
    "a weight used five times": lambda: _of_classes(_seeded(_of_many_uses)),
    "nested values, random numbers": lambda: _of_classes(_seeded(_list)),
    "changed input": lambda: _of_classes(_seeded(_shifted)),
    "strides": lambda: _of_classes(_seeded(_strided), data=_rows(68), loss=functional.mse_loss),
}


def in_double(arguments: Arguments) -> Arguments:
    """The same in float64 and without Adam, which divides what is nothing but rounding by itself."""
    values = [tensor.double() if tensor.is_floating_point() else tensor for tensor in arguments["data"].tensors]
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return {**arguments, "model": arguments["model"].double(), "data": TensorDataset(*values), "optimizer": optimizer}


def train(arguments: Arguments, steps: int) -> dict[str, Any]:
    """Train for some steps; what came out of it."""
    session = paceline.start(**{"timeout_seconds": 30, **arguments})
    reports = [session.step(batch) for batch in session.batches(steps=steps)]
    evaluation = session.evaluate(arguments["data"])
    state = [value.double() for value in arguments["model"].state_dict().values()]
    return {
        "losses": [report.loss.hex() for report in reports],
        "norms": [report.gradient_norm.hex() for report in reports],
        "fingerprint": session.fingerprint(),
        "evaluation": evaluation.hex(),
        "state": [number for value in state for number in (value.sum().item(), value.norm().item())],
    }
