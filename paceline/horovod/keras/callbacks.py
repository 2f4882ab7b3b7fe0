"""Callbacks for ``model.fit`` on several workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from keras.callbacks import Callback

from paceline.horovod import torch as hvd
from paceline.horovod.keras.functions import broadcast_global_variables


class BroadcastGlobalVariablesCallback(Callback):  # type: ignore[misc]
    """Callback that broadcasts the variables of the root rank before the first batch, so that all workers agree."""

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._done = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast once, after all variables have been created."""
        if not self._done:
            broadcast_global_variables(self._root_rank, self.model)
            self._done = True


class MetricAverageCallback(Callback):  # type: ignore[misc]
    """Callback that averages an epoch's metrics over all workers. Put it before callbacks that read the metrics."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace all numbers in the logs by their means over the workers, in one operation."""
        if not logs:
            return
        names = sorted(name for name, value in logs.items() if isinstance(value, int | float))
        values = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64)
        means = hvd.allreduce(values, name="keras.metrics")
        logs.update({name: float(mean) for name, mean in zip(names, means, strict=True)})


class LearningRateScheduleCallback(Callback):  # type: ignore[misc]
    """Callback that sets the learning rate to ``initial_lr`` times a factor in a range of epochs.

    Args:
        initial_lr: learning rate for the factor 1.
        multiplier: factor, or function of the epoch, which has a fractional part unless ``staircase``.
        start_epoch: first epoch of the range. Defaults to 0.
        end_epoch: end of the range, exclusive. Defaults to no end.
        staircase: whether the rate changes only at the start of epochs, not at each batch. Defaults to True.
        momentum_correction: whether a change of the rate scales the momentum for one batch, because SGD's buffer
            contains the rate of earlier batches (Goyal et al. 2017, arXiv 1706.02677). Defaults to True.
        steps_per_epoch: number of batches per epoch, needed without ``staircase``. Defaults to Keras's own count.
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
        self._staircase, self._corrects = staircase, momentum_correction
        self._momentum: float | None = None  # original value while it is scaled
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
        """Restore the momentum if it was scaled."""
        if self._momentum is not None:
            self.model.optimizer.momentum, self._momentum = self._momentum, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the epoch, and set the rate if ``staircase``."""
        self._epoch = epoch
        if self._staircase:
            self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate for this batch unless ``staircase``."""
        if not self._staircase:
            self._set(self._epoch + batch / self._steps_per_epoch())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the logs, as Keras's own callbacks do."""
        if logs is not None:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)

    def _steps_per_epoch(self) -> int:
        steps = self._steps or (self.params or {}).get("steps")
        if not steps:
            raise ValueError(f"{type(self).__name__}: give steps_per_epoch, as Keras does not know it for these data.")
        return int(steps)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Callback for a warm-up from ``initial_lr / size`` to ``initial_lr`` (Goyal et al. 2017, arXiv 1706.02677).

    Args:
        initial_lr: learning rate after the warm-up, usually that of a single worker times ``size()``.
        warmup_epochs: number of epochs of the warm-up. Defaults to 5.
        momentum_correction: see :class:`LearningRateScheduleCallback`.
        steps_per_epoch: number of batches per epoch. Defaults to Keras's own count.
        verbose: 1 if rank 0 prints a message at the end of the warm-up. Defaults to 0.
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
            epoch += 1.0 / self._steps_per_epoch()  # reaches the full rate in the last batch
            size = hvd.size()
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(initial_lr, factor, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self._warmup, self._verbose = warmup_epochs, verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate, and print a message at the end of the warm-up if ``verbose``."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch == self._warmup - 1 and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"epoch {epoch + 1}: warm-up is over, learning rate {rate:g}")  # noqa: T201 - as Keras says it
