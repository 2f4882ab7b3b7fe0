"""Callbacks for ``model.fit`` on all workers at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from keras.callbacks import Callback

from paceline.horovod import torch as hvd
from paceline.horovod.keras.functions import broadcast_global_variables


class BroadcastGlobalVariablesCallback(Callback):  # type: ignore[misc]
    """Gives all workers the variables of the root rank before the first batch, so that they begin alike."""

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._done = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast once, when all variables are there."""
        if not self._done:
            broadcast_global_variables(self._root_rank, self.model)
            self._done = True


class MetricAverageCallback(Callback):  # type: ignore[misc]
    """Replaces what is logged at the end of an epoch by the mean over the workers; put it before those that read it."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the numbers, all in one operation."""
        if not logs:
            return
        names = sorted(name for name, value in logs.items() if isinstance(value, int | float))
        values = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64)
        means = hvd.allreduce(values, name="keras.metrics")
        logs.update({name: float(mean) for name, mean in zip(names, means, strict=True)})


class LearningRateScheduleCallback(Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr`` times a factor, in a range of epochs.

    Args:
        initial_lr: the rate where the factor is 1.
        multiplier: the factor, or ``multiplier(epoch)``; epochs are fractions unless ``staircase``.
        start_epoch: the first of the range.
        end_epoch: where the range ends, left out; none: it does not.
        staircase: change at the beginning of epochs, not at each batch.
        momentum_correction: scale the momentum for one batch as the rate changes, as a buffer of SGD holds the rate of
            the batches before (Goyal et al. 2017, arXiv 1706.02677).
        steps_per_epoch: batches of an epoch, if not staircase; Keras's own count if none.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self._initial = initial_lr
        self._factor = multiplier if callable(multiplier) else lambda epoch: multiplier
        self._start, self._end = start_epoch, end_epoch
        self._staircase = staircase
        self._corrects = momentum_correction
        self._momentum: float | None = None  # while it is scaled
        self._steps = steps_per_epoch
        self._epoch = 0

    def _set(self, epoch: float) -> None:
        if epoch < self._start or (self._end is not None and epoch >= self._end):
            return
        optimizer = self.model.optimizer
        before, rate = float(optimizer.learning_rate), self._initial * self._factor(epoch)
        optimizer.learning_rate = rate
        if self._corrects and getattr(optimizer, "momentum", None) and before:
            self._momentum = optimizer.momentum
            optimizer.momentum = self._momentum * rate / before

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Restore the momentum."""
        if self._momentum is not None:
            self.model.optimizer.momentum, self._momentum = self._momentum, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch; set the rate if it changes with epochs only."""
        self._epoch = epoch
        if self._staircase:
            self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate within the epoch."""
        if not self._staircase:
            self._set(self._epoch + batch / self._steps_per_epoch())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate, as Keras's own callbacks do."""
        if logs is not None:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)

    def _steps_per_epoch(self) -> int:
        steps = self._steps or (self.params or {}).get("steps")
        if not steps:
            raise ValueError(f"{type(self).__name__}: give steps_per_epoch, as Keras does not know it for these data.")
        return int(steps)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` (Goyal et al. 2017, arXiv 1706.02677).

    Args:
        initial_lr: the rate for all workers together, mostly that of one worker times ``size()``.
        warmup_epochs: over how many epochs.
        momentum_correction: see :class:`LearningRateScheduleCallback`.
        steps_per_epoch: batches of an epoch; Keras's own count if none.
        verbose: 1: rank 0 says when the warm-up is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def factor(epoch: float) -> float:
            epoch += 1.0 / self._steps_per_epoch()  # full at the end of the last batch
            size = hvd.size()
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(initial_lr, factor, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self._warmup, self._verbose = warmup_epochs, verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Say that the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch == self._warmup - 1 and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"epoch {epoch + 1}: warm-up is over, learning rate {rate:g}")  # noqa: T201 - as Keras says it
