"""Checks of a step's results that every worker makes on the same data."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from paceline.checkpoint.weights.sparse_embedding import SparseEmbedding
from paceline.errors import InputError, NonFiniteLoss, name_microbatches
from paceline.schedule.tree import Node, total
from paceline.settings import Exact

Sparse: TypeAlias = Literal["none", "modules", "any"]
"""Which gradients may be sparse: those of embeddings with ``sparse=True``, or those of any code."""


class MicrobatchResult(NamedTuple):
    """Result of a microbatch group: sum of the losses and its divisor, and indices of parameters without a gradient.

    ``rank`` computed the group. ``metrics`` holds a sum and a divisor for each metric. ``origin`` is the step to whose
    batch the microbatches belong, if another step uses them.
    """

    microbatches: range
    rank: int
    loss: float
    counted: float
    missing: frozenset[int] = frozenset()
    origin: int | None = None
    metrics: tuple[float, ...] = ()


def mean_loss(parts: Sequence[MicrobatchResult], exact: Exact) -> float:
    """Return the mean loss over the batch. With ``exact`` its bits do not depend on which worker computed what."""
    count = math.fsum(part.counted for part in parts)
    if count == 0:
        raise InputError(
            "The loss of the whole batch has a count of 0: there is nothing to take a mean over. A pair is the sum of "
            "the losses and its divisor; a metric is returned as loss, {'name': value}."
        )
    return _sum(parts, [part.loss for part in parts], exact) / count


def mean_metrics(parts: Sequence[MicrobatchResult], names: Sequence[str] | None, exact: Exact) -> dict[str, float]:
    """Return the mean of each metric as :func:`mean_loss` does, or NaN if the metric's counts add up to zero."""
    means = {}
    for place, name in enumerate(names or ()):
        count = math.fsum(part.metrics[2 * place + 1] for part in parts)
        value = _sum(parts, [part.metrics[2 * place] for part in parts], exact)
        means[name] = value / count if count else math.nan
    return means


def _sum(parts: Sequence[MicrobatchResult], values: Sequence[float], exact: Exact) -> float:
    """Sum one value for each microbatch group, along the canonical tree if ``exact``."""
    if not exact:
        return sum(values)
    nodes = (Node(0, part.microbatches.start) for part in parts)
    return total(zip(nodes, values, strict=True), lambda a, b: a + b)


def not_finite(parts: Sequence[MicrobatchResult]) -> MicrobatchResult | None:
    """Return the first microbatch group whose loss is NaN or infinite, or None."""
    return next((part for part in parts if not math.isfinite(part.loss)), None)


def non_finite(part: MicrobatchResult, microbatches: range, step: int) -> NonFiniteLoss:
    """Build the error for a microbatch group with a NaN or infinite loss, naming the microbatches that caused it."""
    return NonFiniteLoss(
        f"The loss is {part.loss} at step {step}, {_named(microbatches, part.origin)}, computed by rank {part.rank}. "
        f"No update was made. Look at the data of this step and at the learning rate; "
        f"nonfinite='skip' leaves such steps out."
    )


def non_finite_batch(part: MicrobatchResult, step: int) -> NonFiniteLoss:
    """Build the error for a NaN or infinite loss over the whole batch."""
    return NonFiniteLoss(
        f"The loss over the whole batch is {part.loss} at step {step}. No update was made. Look at the outputs of "
        f"forward, at batch_loss and at the learning rate; nonfinite='skip' leaves such steps out."
    )


def unused(parts: Sequence[MicrobatchResult]) -> frozenset[int]:
    """Return the indices of parameters that got no gradient from any microbatch group."""
    return frozenset.intersection(*(part.missing for part in parts))


def check_gradients(parts: Sequence[MicrobatchResult], names: Sequence[str]) -> None:
    """Raise InputError if a parameter got a gradient from some microbatch groups only."""
    somewhere = frozenset[int]().union(*(part.missing for part in parts)) - unused(parts)
    for place in sorted(somewhere):
        without = [part for part in parts if place in part.missing]
        where = "; ".join(f"{_named(part.microbatches, part.origin)} on rank {part.rank}" for part in without)
        raise InputError(
            f"The parameter {names[place]!r} got no gradient from {where}, but did from the rest of the batch. "
            f"If the forward pass is meant to use it only sometimes, set missing_gradient='zero'; otherwise look for "
            f"code that depends on the rank or on the data."
        )


def sparse_parameters(model: nn.Module, allowed: Sparse) -> frozenset[str]:
    """Return the names of the weights of embeddings with sparse gradients.

    Raises:
        InputError: an embedding gives sparse gradients, and none are allowed.
    """
    sparse = {}
    for name, one in model.named_modules():
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse and one.weight.requires_grad:
            _check_embedding(name, one)
            sparse[id(one.weight)] = name
        elif isinstance(one, SparseEmbedding):
            if one.source is not None:
                one.source.check()
            sparse.update((id(block), name) for block in one.blocks if block.requires_grad)
    if sparse and allowed == "none":
        raise sparse_gradients(f"{next(iter(sparse.values()))!r} gives")
    return frozenset(name for name, one in model.named_parameters() if id(one) in sparse)


def _check_embedding(name: str, one: nn.Embedding | nn.EmbeddingBag) -> None:
    """Raise InputError if an embedding has an option with which torch computes no sparse gradients."""
    option = "scale_grad_by_freq=True" if one.scale_grad_by_freq else ""
    if isinstance(one, nn.EmbeddingBag) and one.mode == "max":
        option = "mode='max'"
    if option:
        raise InputError(f"{name!r} has {option}, for which torch computes no sparse gradients: use sparse=False.")


def check_dense(names: Iterable[str], gradients: Sequence[torch.Tensor | None], sparse: Container[str] = ()) -> None:
    """Raise InputError if a gradient is sparse, except those of the parameters named in ``sparse``."""
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None and gradient.is_sparse and name not in sparse:
            raise sparse_gradients(f"The parameter {name!r} gets")


def sparse_gradient(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """Return the coalesced gradient of an embedding. Raises InputError if it is dense."""
    if not gradient.is_sparse:
        raise InputError(
            f"The parameter {name!r} of an embedding with sparse=True gets a dense gradient, because the forward pass "
            f"also uses it elsewhere: use sparse=False."
        )
    return gradient.coalesce()


def sparse_gradients(what: str) -> InputError:
    """Build the error for a module that produces sparse gradients, or a parameter or value that gets them."""
    return InputError(
        f"{what} sparse gradients, which several workers, now or later, cannot average here: use strategy 'allreduce', "
        f"'sharded' or 'parameter-server' without backup workers with torch.nn.Embedding or EmbeddingBag (sparse=True) "
        f"or paceline.SparseEmbedding, wire = 'float32', communication = 'fixed' and no exact = 'fixed-point'; or "
        f"strategy 'hogwild', or dense gradients (sparse=False)."
    )


def _named(microbatches: range, origin: int | None) -> str:
    return name_microbatches(microbatches) + ("" if origin is None else f" of the batch of step {origin}")
