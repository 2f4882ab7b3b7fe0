"""Steps of a LightningModule as the forward pass and the metrics of a session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.adapters.lightning.optimizers import configured
from paceline.errors import InputError

_log = logging.getLogger("paceline")
_REFUSED = (
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward", "configure_gradient_clipping"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("on_train_batch_start", "on_train_batch_end", "training_step_end"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "configure_model"),
)
"""Hooks that change how a step is taken. Modules that override them are refused."""
_NOT_CALLED = (
    *("setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "prepare_data"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_save_checkpoint", "on_load_checkpoint"),
)


def arguments(module: nn.Module, steps_per_epoch: int | None = None) -> dict[str, Any]:
    """Return the arguments of :func:`paceline.start` that a LightningModule determines: all but data and settings.

    ``training_step`` gets each microbatch with the index 0, and returns the mean loss over it. Values that it passes to
    ``self.log`` or ``self.log_dict`` are in ``report.metrics``, as means over the samples, or over ``batch_size`` if it
    is given.

    Args:
        module: module whose ``configure_optimizers`` is called immediately.
        steps_per_epoch: number of updates after which a scheduler with the interval ``epoch`` (the default) advances.

    Raises:
        InputError: the module optimizes manually, has several optimizers or a scheduler that needs a metric, overrides
            a hook that changes how a step is taken, or a scheduler needs ``steps_per_epoch``.
    """
    _check(module)
    optimizer, scheduler = configured(module, steps_per_epoch)
    given: dict[str, Any] = {"model": module, "forward": training, "optimizer": lambda model: optimizer}
    return given | ({} if scheduler is None else {"schedule": lambda optimizer: scheduler})


def training(module: Any, microbatch: Any) -> Any:
    """Run ``training_step``, as the ``forward`` of a session.

    Returns:
        the loss. If values were logged, a pair of the loss and these values by name.

    Raises:
        InputError: ``training_step`` returned no loss, or logged a module instead of its value.
    """
    with _collecting(module) as logged:
        result = module.training_step(microbatch, 0)
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if loss is None:
        raise InputError(
            "training_step returned no loss: a step cannot be skipped by one microbatch. Return the loss, or a "
            "dictionary with 'loss'."
        )
    return (loss, logged) if logged else loss


def validation(name: str, step: str = "validation_step") -> Callable[[Any, Any], Any]:
    """Return a metric for ``session.evaluate``: the value that ``validation_step`` logs under a name.

    Args:
        name: name passed to ``self.log``.
        step: name of the method to call, such as ``test_step``. Defaults to ``validation_step``.
    """

    def metric(module: Any, microbatch: Any) -> Any:
        with _collecting(module) as logged:
            getattr(module, step)(microbatch, 0)
        if name not in logged:
            there = f"it logged {', '.join(map(repr, logged))}" if logged else "it logged nothing"
            raise InputError(f"{step} did not log {name!r}: {there}.")
        return logged[name]

    metric.__name__ = name
    return metric


@contextmanager
def _collecting(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Collect the values that a module passes to ``self.log`` and ``self.log_dict`` in a dictionary."""
    logged: dict[str, Any] = {}

    def log(name: str, value: Any, *_: Any, batch_size: int | None = None, **__: Any) -> None:
        if isinstance(value, nn.Module):
            raise InputError(
                f"self.log({name!r}, ...) was given a {type(value).__name__}, whose state belongs to one worker: log "
                f"its value for this batch, as in self.log({name!r}, metric(predictions, targets))."
            )
        number = value.detach() if isinstance(value, torch.Tensor) else value
        if isinstance(number, torch.Tensor) and number.numel() == 1:
            number = number.reshape(())
        logged[name] = number if batch_size is None else (number * batch_size, batch_size)

    def log_dict(dictionary: Mapping[str, Any], *_: Any, batch_size: int | None = None, **__: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, batch_size=batch_size)

    module.__dict__.update(log=log, log_dict=log_dict)
    try:
        yield logged
    finally:
        del module.__dict__["log"], module.__dict__["log_dict"]


def _check(module: Any) -> None:
    kind = type(module).__name__
    for name in ("training_step", "configure_optimizers"):
        if not callable(getattr(module, name, None)):
            raise InputError(f"{kind} has no method {name}: it is not a LightningModule.")
    if not getattr(module, "automatic_optimization", True):
        raise InputError(
            f"{kind} optimizes manually (automatic_optimization is False), which its training_step cannot do on "
            f"several workers. Give paceline.start the model, a forward for each loss, and the optimizers by name."
        )
    if overridden := [name for name in _REFUSED if _overrides(module, name)]:
        raise InputError(
            f"{kind} overrides {', '.join(overridden)}, which would not be called. Use a setting, such as clip_norm, "
            f"or the script's own loop instead."
        )
    if unused := [name for name in _NOT_CALLED if _overrides(module, name)]:
        _log.warning("%s overrides %s, which are not called: put that into the script", kind, ", ".join(unused))


def _overrides(module: nn.Module, name: str) -> bool:
    """Return whether a class outside Lightning defines a method."""
    home = getattr(getattr(type(module), name, None), "__module__", None)
    return home is not None and home.partition(".")[0] not in ("lightning", "pytorch_lightning")
