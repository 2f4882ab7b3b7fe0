"""Access to the whole state with any strategy: to the optimizer, and to the weights in memory or in a file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.storage.locations import place
from paceline.checkpoint.weights.files import check_suffix, complete_weights, write
from paceline.environments import env
from paceline.errors import CheckpointError, ConfigError, InputError
from paceline.training.loop import TrainingLoop
from paceline.training.progress import WEIGHTS, Call

_log = logging.getLogger("paceline")
_PAST = (
    "The other workers made this call of session.model_state() before this worker joined or resumed. With strategy "
    "{strategy!r} a worker has a part of the weights only, so it cannot get them alone. Use "
    "session.model_state(everywhere=False), which gives them to rank 0, or session.export(path)."
)


class Exports:
    """Optimizer and weights at the script's current position. All workers export weights together.

    A worker that joined later skips exports that the other workers have already made.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self._context = loop.context

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer, if this worker makes every update."""
        if not self._context.replicated:
            raise ConfigError(
                f"session.optimizer: with strategy {self._context.settings.strategy!r} not every worker makes every "
                f"update, so the optimizer is not whole here. Give a schedule for the learning rate, save with "
                f"session.save(), or use 'allreduce' or 'stealing'."
            )
        return self._context.update.optimizer

    def weights(self, everywhere: bool) -> dict[str, Any]:
        """Return the complete weights in host memory; empty on ranks other than 0 unless ``everywhere``."""
        found: dict[str, Any] = {}

        def copy() -> None:
            found.clear()
            if everywhere or self._context.world.rank == 0:
                with self._context.update.evaluating():
                    found.update(complete_weights(self._context.compute.model))

        if not self._together("copying the weights", copy) and everywhere:
            try:
                with self._context.update.averages.in_place(alone=True):
                    copy()
            except InputError:  # this worker has its stages, or its share of averages, only
                raise InputError(_PAST.format(strategy=self._context.settings.strategy)) from None
        return found

    def export(self, path: Path | str, dtype: torch.dtype | None, max_shard_size: int) -> Path | str:
        """Write the complete weights to a file and return its location. On return the file is complete, on any rank."""
        check_suffix(path)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"export(dtype={dtype!r}): give a floating-point type, such as torch.bfloat16.")
        if not isinstance(max_shard_size, int) or max_shard_size < 1:
            raise ConfigError(
                f"export(max_shard_size={max_shard_size!r}): give a number of bytes, such as 5_000_000_000."
            )

        location = place(str(path))
        location = location.absolute() if isinstance(location, Path) else location

        def act() -> None:
            if self._context.world.rank == 0 and not env.is_rehearsal():
                with self._context.update.evaluating():
                    write(location, self._context.compute.model.state_dict(keep_vars=True), dtype, max_shard_size)

        if not self._together("exporting the weights", act) and self._context.world.rank == 0:
            _log.info("%s is not written again: training has gone on since", location)
        return location

    def _together(self, doing: str, act: Callable[[], None]) -> bool:
        """Call ``act`` on all workers together. Return False if a resumed or joined worker's run is already past it."""
        loop, acted = self._loop, False
        steps = loop.position.asked
        if loop.position.target and steps < loop.progress.steps:
            return False

        def act_with_others(_: Call) -> tuple[None, int]:
            nonlocal acted
            loop.activity.begin(doing, busy=True)
            failed = ""
            try:
                with self._context.update.averages.in_place():
                    act()
            except CheckpointError as error:
                failed = str(error)
            everyone = self._context.world.gather((failed, self._context.world.notice()), doing)
            loop.activity.begin("in the script")
            for reason, _ in everyone:
                if reason:
                    raise CheckpointError(reason)
            acted = True
            return None, max(notice for _, notice in everyone)

        with self._context.events.span("weights", step=steps, doing=doing):
            loop.make(WEIGHTS, doing, act_with_others)
        return acted
