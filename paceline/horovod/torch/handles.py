"""Handles of pending operations, and differentiation through their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.horovod.engine.handle import Handle

Tensors = Sequence[torch.Tensor]


def poll(handle: Handle) -> bool:
    """Return whether an operation has ended, so that :func:`synchronize` would not block.

    Raises:
        TypeError: ``handle`` is not a handle.
    """
    if not isinstance(handle, Handle):
        raise _no_handle("poll", handle)
    return handle.done()


def synchronize(handle: Any) -> Any:
    """Wait until an operation has ended, and return its result or list of results.

    Raises:
        HorovodInternalError: the operation has failed.
        TypeError: ``handle`` is not a handle.
    """
    if isinstance(handle, Handle):
        return handle.results()
    if not callable(handle):
        raise _no_handle("synchronize", handle)
    return handle()


def _no_handle(called: str, given: Any) -> TypeError:
    return TypeError(f"hvd.{called}({given!r}): give the handle that an operation ending in _async has returned.")


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensors], Tensors], back: Callable[[Tensors], Tensors], *given: Any) -> Any:
        ctx.back = back
        found = tuple(run(given))
        ctx.mark_non_differentiable(*[one for one in found if not one.dtype.is_floating_point])
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.back([one.contiguous() for one in gradients])


def like(tensors: Tensors) -> list[torch.Tensor]:
    """Return empty tensors for results. Other objects, which are refused later, stay unchanged."""
    return [torch.empty_like(one.detach()) if isinstance(one, torch.Tensor) else one for one in tensors]


def differentiated(
    run: Callable[[Tensors], Tensors], back: Callable[[Tensors], Tensors], tensors: Tensors
) -> list[torch.Tensor]:
    """Return the results of an operation with automatic differentiation.

    Args:
        run: operation on tensors without gradients.
        back: function from the gradients of the results to those of the tensors.
    """
    if not torch.is_grad_enabled() or not any(isinstance(one, torch.Tensor) and one.requires_grad for one in tensors):
        return list(run(tensors))
    return list(_Differentiated.apply(run, back, *tensors))  # type: ignore[no-untyped-call]
