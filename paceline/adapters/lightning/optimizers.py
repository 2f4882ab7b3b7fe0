"""Optimizer and scheduler from each form of the result of ``configure_optimizers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import InputError


def configured(module: Any, steps_per_epoch: int | None) -> tuple[Optimizer, LRScheduler | None]:
    """Return the optimizer, and the scheduler or None.

    Raises:
        InputError: see :func:`paceline.adapters.lightning.arguments`.
    """
    try:
        made = module.configure_optimizers()
    except RuntimeError as error:
        if "trainer" not in str(error).lower():
            raise
        raise InputError(
            f"configure_optimizers of {type(module).__name__} needs its Trainer, and there is none. Give it what it "
            f"needs, such as the number of steps, when it is built. ({error})"
        ) from error
    schedulers: Sequence[Any] = ()
    if isinstance(made, tuple) and len(made) == 2 and all(isinstance(one, list | tuple) for one in made):
        made, schedulers = made
    several = list(made) if isinstance(made, list | tuple) else [made]
    if len(several) > 1 or len(schedulers) > 1:
        names = ", ".join(type(one.get("optimizer") if isinstance(one, Mapping) else one).__name__ for one in several)
        raise InputError(
            f"configure_optimizers of {type(module).__name__} returns several optimizers ({names}) or schedulers, "
            f"which needs manual optimization. Give paceline.start the optimizers by name, and a forward for each."
        )
    first = several[0] if several else None
    if isinstance(first, Mapping):
        schedulers = [first["lr_scheduler"]] if first.get("lr_scheduler") is not None else schedulers
        first = first.get("optimizer")
    if not isinstance(first, Optimizer):
        raise InputError(
            f"configure_optimizers of {type(module).__name__} must return an optimizer, but it is a "
            f"{type(first).__name__}."
        )
    return first, _scheduler(schedulers[0], steps_per_epoch) if schedulers else None


def _scheduler(given: Any, steps_per_epoch: int | None) -> LRScheduler:
    settings = {"scheduler": given, **(given if isinstance(given, Mapping) else {})}
    scheduler, interval = settings["scheduler"], settings.get("interval", "epoch")
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise InputError(
            f"{type(scheduler).__name__} cannot be the scheduler: it depends on a metric, or is not one of torch's. "
            f"Use one over the number of updates, such as torch.optim.lr_scheduler.CosineAnnealingLR."
        )
    every = int(settings.get("frequency", 1))
    if interval == "epoch":
        if steps_per_epoch is None:
            raise InputError(
                f"{type(scheduler).__name__} advances once per epoch: give arguments(module, steps_per_epoch=...), "
                f"or return it with 'interval': 'step'."
            )
        every *= steps_per_epoch
    return scheduler if every == 1 else EveryUpdates(scheduler, every)


class EveryUpdates(LRScheduler):
    """Scheduler that advances once in ``every`` updates."""

    def __init__(self, scheduler: LRScheduler, every: int) -> None:
        self.scheduler, self.every = scheduler, every
        self.updates = 0
        self.optimizer = scheduler.optimizer

    def step(self, epoch: int | None = None) -> None:
        """Count an update, and advance the scheduler if it is due."""
        self.updates += 1
        if self.updates % self.every == 0:
            self.scheduler.step()

    def get_last_lr(self) -> Any:
        """Return the learning rates of the groups."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.updates = state_dict["updates"]
        self.scheduler.load_state_dict(state_dict["scheduler"])
