"""Values of Keras from one worker to all, and means over all."""

from __future__ import annotations

from typing import Any

import torch

from paceline.horovod import torch as hvd
from paceline.horovod.keras.optimizer import DistributedOptimizer


def allreduce(value: Any, name: str | None = None, op: Any = hvd.Average) -> Any:
    """Reduce a number or an array-like over all workers, to a tensor."""
    return hvd.allreduce(torch.as_tensor(value), name=name, op=op)


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate arrays of all workers along the first dimension, which may differ, to a tensor."""
    return hvd.allgather(torch.as_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the root rank's array, as a tensor."""
    return hvd.broadcast(torch.as_tensor(value), root_rank, name=name)


def broadcast_global_variables(root_rank: int, model: Any) -> None:
    """Overwrite the variables of a model, and of its optimizer if it has one, with those of the root rank.

    Args:
        root_rank: who has the right ones.
        model: of Keras; Keras 3 knows no global variables.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
    hvd.broadcast_parameters([(f"{place}.{one.path}", one.value) for place, one in enumerate(variables)], root_rank)


def load_model(filepath: str, custom_objects: dict[str, Any] | None = None, compression: Any = None) -> Any:
    """Load a model that was saved with a distributed optimizer or another one; its optimizer is distributed.

    Args:
        filepath: written by ``model.save``.
        custom_objects: as for ``keras.saving.load_model``.
        compression: of the gradients.
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
