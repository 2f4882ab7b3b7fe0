"""Broadcasts and reductions of Keras values and models."""

from __future__ import annotations

from typing import Any

import torch

from paceline.horovod import torch as hvd
from paceline.horovod.keras.optimizer import DistributedOptimizer


def allreduce(value: Any, name: str | None = None, op: Any = hvd.Average) -> Any:
    """Return a number or an array-like reduced over all workers, as a tensor."""
    return hvd.allreduce(torch.as_tensor(value), name=name, op=op)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the arrays of all workers, concatenated along the first dimension, which may differ, as a tensor."""
    return hvd.allgather(torch.as_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the root rank's array, as a tensor."""
    return hvd.broadcast(torch.as_tensor(value), root_rank, name=name)


def broadcast_global_variables(root_rank: int, model: Any) -> None:
    """Overwrite the variables of a model, and of its optimizer if it has one, with those of the root rank.

    Args:
        root_rank: rank whose variables are sent.
        model: Keras model, which is needed because Keras 3 has no global variables.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
    hvd.broadcast_parameters([(f"{place}.{one.path}", one.value) for place, one in enumerate(variables)], root_rank)


def load_model(filepath: str, custom_objects: dict[str, Any] | None = None, compression: Any = None) -> Any:
    """Load a model and make its optimizer distributed, whether or not it was saved with a distributed optimizer.

    Args:
        filepath: file written by ``model.save``.
        custom_objects: custom objects, as for ``keras.saving.load_model``.
        compression: compression of transferred gradients. Defaults to none.
    """
    import keras

    model = keras.saving.load_model(filepath, custom_objects=custom_objects)
    if model.optimizer is not None:
        saved = [(one.path, one.value.detach().clone()) for one in model.optimizer.variables]
        made = DistributedOptimizer(model.optimizer, compression=compression or hvd.Compression.none)
        made.build(model.trainable_variables)
        for one, (_, value) in zip(made.variables, saved, strict=True):
            one.assign(value)
        model.optimizer = made
    return model
