"""Handles of operations under way, and how results are differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.horovod.engine.handle import Handle

Tensors = Sequence[torch.Tensor]


class Operation:
    """An operation under way, for :func:`poll` and :func:`synchronize`.

    Args:
        handle: of the engine.
        single: whether it has one result, which is given as it is.
    """

    def __init__(self, handle: Handle, single: bool) -> None:
        self.handle, self._single = handle, single

    def results(self) -> Any:
        """Wait for the results."""
        found = self.handle.wait()
        return found[0] if self._single else found


def poll(handle: Operation) -> bool:
    """Whether :func:`synchronize` would return at once.

    Raises:
        TypeError: it is no handle.
    """
    if not isinstance(handle, Operation):
        raise _no_handle("poll", handle)
    return handle.handle.done()


def synchronize(handle: Any) -> Any:
    """Wait until an operation is done; gives its result, or the list of them.

    Raises:
        HorovodInternalError: it has failed.
        TypeError: it is no handle.
    """
    if isinstance(handle, Operation):
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
    """Room for results; what is no tensor, which is refused later, stays as it is."""
    return [torch.empty_like(one.detach()) if isinstance(one, torch.Tensor) else one for one in tensors]


def differentiated(
    run: Callable[[Tensors], Tensors], back: Callable[[Tensors], Tensors], tensors: Tensors
) -> list[torch.Tensor]:
    """The results of an operation, through which gradients flow back.

    Args:
        run: the operation, on tensors without gradients.
        back: from the gradients of its results to those of the tensors.
        tensors: given to the operation.
    """
    if not torch.is_grad_enabled() or not any(isinstance(one, torch.Tensor) and one.requires_grad for one in tensors):
        return list(run(tensors))
    return list(_Differentiated.apply(run, back, *tensors))  # type: ignore[no-untyped-call]
