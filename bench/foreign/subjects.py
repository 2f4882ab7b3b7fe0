"""Models and optimizers of public packages: how to build each with small data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import models
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

Arguments = dict[str, Any]
SUBJECTS: dict[str, Callable[[], Arguments]] = {}


def features(samples: int = 96) -> TensorDataset:
    values = torch.randn(samples, 12, generator=torch.Generator().manual_seed(1))
    return TensorDataset(values, values[:, :4].argmax(1))


def small_model() -> nn.Module:
    """Its sizes are odd, so that a tensor that lies behind another one is not aligned by chance."""
    return nn.Sequential(
        nn.Linear(12, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, 131), nn.Tanh(), nn.Linear(131, 5)
    )


def optimized(optimizer: Callable[..., Any]) -> Arguments:
    """An optimizer that trains a small model."""
    loss = functional.cross_entropy
    return {"model": small_model(), "optimizer": optimizer, "data": features(), "loss": loss}


def prepare() -> None:
    """Import the packages, and fill ``SUBJECTS``."""
    SUBJECTS.update(models.subjects())
    for package in (_torch_optimizers, _pytorch_optimizer, _torch_optimizer):
        package()


def _rated(made: Callable[..., Any]) -> Callable[..., Any]:
    """With a small learning rate, if it has one."""

    def factory(parameters: Any) -> Any:
        try:
            return made(parameters, lr=1e-3)
        except TypeError:
            return made(parameters)

    return factory


def _add(package: str, name: str, made: Callable[..., Any]) -> None:
    SUBJECTS[f"optimizer {package} {name}"] = partial(optimized, _rated(made))


def _classes(module: Any) -> list[tuple[str, Any]]:
    found = sorted(vars(module).items())
    kinds = [(name, one) for name, one in found if isinstance(one, type) and issubclass(one, torch.optim.Optimizer)]
    return [(name, one) for name, one in kinds if one is not torch.optim.Optimizer]


def _torch_optimizers() -> None:
    for name, made in _classes(torch.optim):
        _add("torch", name, made)


def _pytorch_optimizer() -> None:
    import pytorch_optimizer

    for name in sorted(pytorch_optimizer.get_supported_optimizers()):
        _add("pytorch_optimizer", name, pytorch_optimizer.load_optimizer(name))


def _torch_optimizer() -> None:
    import torch_optimizer

    for name, made in _classes(torch_optimizer):
        _add("torch_optimizer", name, made)
