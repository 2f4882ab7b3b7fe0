"""Losses over the whole batch, which scripts of these tests train: what ``forward`` returns, and the loss over it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from subjects import classes
from torch import nn
from torch.nn import functional

import paceline

LENGTH, BATCH = 96, 32


class Net(nn.Module):
    """Two towers, experts and a temperature. The samples that it gets are noisy unless it is plain."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        layers = [] if plain else [nn.BatchNorm1d(16), nn.Dropout(0.1)]
        self.body = nn.Sequential(nn.Linear(12, 16), *layers, nn.ReLU(), nn.Linear(16, 6))
        self.other = nn.Linear(12, 6)
        self.gates = nn.Linear(12, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.plain = plain

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the embeddings of both towers, and the gates of the experts."""
        if not self.plain:
            values = values + 0.2 * torch.randn_like(values)
        return self.body(values), self.other(values), self.gates(values)


def embeddings_of_views(model: Any, values: torch.Tensor) -> list[torch.Tensor]:
    """Return the embeddings of two views of the samples."""
    return [*model(torch.cat([values + 0.2 * values.sin(), values + 0.2 * values.cos()]))[0].chunk(2)]


def two_views(model: Any, microbatch: Any) -> dict[str, torch.Tensor]:
    first, second = map(functional.normalize, embeddings_of_views(model, microbatch[0]))
    return {"first": first, "second": second}


def noisy_views(model: Any, microbatch: Any) -> dict[str, torch.Tensor]:
    """Draw before the model and after it, and change the data."""
    values = microbatch[0]
    values += 0.1 * torch.randn_like(values)
    first, second = embeddings_of_views(model, values)
    return {"first": functional.dropout(first, 0.1), "second": second + 0.1 * torch.randn_like(second)}


def simclr(outputs: Any, batch: paceline.Batch) -> Any:
    vectors = torch.cat([outputs["first"], outputs["second"]])
    alike = (vectors @ vectors.t() / 0.5).masked_fill(torch.eye(len(vectors), dtype=torch.bool), -1e9)
    target = torch.arange(len(vectors)).roll(batch.samples)
    return functional.cross_entropy(alike, target), {"hits": (alike.argmax(1) == target).double().mean()}


def vectors_and_labels(model: Any, microbatch: Any) -> dict[str, torch.Tensor]:
    values, label = microbatch
    return {"vector": model(values)[0], "label": label}


def hardest_triplets(outputs: Any, batch: paceline.Batch) -> torch.Tensor:
    vectors, label = outputs["vector"], outputs["label"]
    distances: torch.Tensor = (vectors[:, None] - vectors).square().sum(2)
    same = label[:, None] == label
    far, near = distances.masked_fill(~same, -1.0).amax(1), distances.masked_fill(same, 1e9).amin(1)
    return functional.relu(far - near + 1.0).mean()


def towers(model: Any, microbatch: Any) -> dict[str, torch.Tensor]:
    values, _ = microbatch
    image, text, _ = map(functional.normalize, model(values))
    return {"image": image, "text": text}


def clip(outputs: Any, batch: paceline.Batch, model: Any) -> torch.Tensor:
    logits = outputs["image"].mul_(model.logit_scale.exp()) @ outputs["text"].t()  # in place
    target = torch.arange(batch.samples)
    return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.t(), target)) / 2


def correlation(model: Any, microbatch: Any) -> paceline.Sum:
    first, second = embeddings_of_views(model, microbatch[0])
    return paceline.Sum(first.t() @ second)


def barlow_twins(cross: Any, batch: paceline.Batch) -> torch.Tensor:
    cross = cross / batch.samples
    diagonal = cross.diagonal()
    loss: torch.Tensor = (diagonal - 1).square().sum() + 0.005 * (cross.square().sum() - diagonal.square().sum())
    return loss


def loads_and_losses(model: Any, microbatch: Any) -> dict[str, Any]:
    values, label = microbatch
    outputs, _, gates = model(values)
    gates = gates.softmax(1)
    losses = functional.cross_entropy(outputs[:, :4] * gates, label, reduction="none")
    chosen = functional.one_hot(gates.argmax(1), 4)
    return {"loss": losses, "load": paceline.Sum(gates.sum(0)), "chosen": paceline.Sum(chosen.sum(0))}


def balanced(outputs: Any, batch: paceline.Batch) -> torch.Tensor:
    shares = outputs["load"] / batch.samples * outputs["chosen"] / batch.samples
    loss: torch.Tensor = outputs["loss"].mean() + 0.1 * 4 * shares.sum()
    return loss


LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "simclr": (two_views, simclr),
    "noisy": (noisy_views, simclr),
    "triplets": (vectors_and_labels, hardest_triplets),
    "clip": (towers, clip),
    "barlow twins": (correlation, barlow_twins),
    "experts": (loads_and_losses, balanced),
}


def loss_of(name: str, model: nn.Module) -> Callable[..., Any]:
    """Return the loss of this name over the outputs. The one that uses a parameter gets the model."""
    loss = LOSSES[name][1]
    return (lambda outputs, batch: clip(outputs, batch, model)) if loss is clip else loss


def start(name: str, model: nn.Module | None = None, **more: Any) -> paceline.Session:
    torch.manual_seed(0)
    model = Net() if model is None else model
    given: dict[str, Any] = {
        "model": model,
        "optimizer": partial(torch.optim.Adam, lr=0.01),
        "forward": LOSSES[name][0],
        "batch_loss": loss_of(name, model),
        "data": classes(LENGTH),
        "batch": BATCH,
    }
    return paceline.start(**given | more)


def train(name: str, epochs: int = 2, **more: Any) -> list[Any]:
    """Return the losses of all steps, the metrics of the last one, and the fingerprint."""
    session = start(name, **more)
    reports = [session.step(batch) for batch in session.batches(epochs=epochs)]
    return [[one.loss for one in reports], reports[-1].metrics, session.fingerprint()]
