"""The state of a run: snapshot, comparison with a checkpoint, restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint import files, manifest
from paceline.checkpoint.load import Content, check_model
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.snapshot import Snapshot
from paceline.checkpoint.tensors import check_savable, load_optimizer_state, named_tensors
from paceline.errors import CheckpointError


class StatefulUpdate(Protocol):
    """The parts of an update that have a state."""

    optimizer: Optimizer
    schedule: LRScheduler | None


class TrainingState:
    """The state of a run, which is saved and restored.

    Args:
        model: the model.
        update: its optimizer and schedule.
        order: what determines the order of samples; a checkpoint of another order is refused.
        numerics: what affects the bits; must be the same with ``exact``.
        versions: of Python and the libraries.
        strategy_state: of the strategy; changed in location.
    """

    def __init__(
        self,
        model: nn.Module,
        update: StatefulUpdate,
        order: dict[str, int],
        numerics: dict[str, object],
        versions: dict[str, str],
        strategy_state: dict[str, Any],
    ) -> None:
        self._model = model
        self._update = update
        self._order = order
        self._numerics = numerics
        self._versions = versions
        self._strategy_state = strategy_state

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return named_tensors(self._model, self._update.optimizer)

    def snapshot(self, step: int) -> Snapshot:
        """The state after ``step`` steps, not copied: training goes on to change the tensors.

        Raises:
            CheckpointError: the optimizer has a state that cannot be saved.
        """
        check_savable(self._update.optimizer)
        extra = files.as_tensor(self._extra())
        return Snapshot(step, self.tensors(), extra, self._order, self._numerics, self._versions)

    def _extra(self) -> dict[str, Any]:
        """What is not a tensor: parameter groups, schedule, strategy state."""
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._update.optimizer.param_groups
        ]
        schedule = self._update.schedule
        return {
            "optimizer": type(self._update.optimizer).__name__,
            "groups": groups,
            "schedule": None if schedule is None else schedule.state_dict(),
            "strategy_state": dict(self._strategy_state),
        }

    def check(self, location: Path | str, saved: Manifest) -> None:
        """Refuse a checkpoint that does not fit this run.

        Raises:
            CheckpointError: of another model, another order of samples, or with ``exact`` of other numerics.
        """
        check_model(saved, self._model, location)
        self._check_same(location, saved)

    def restore(self, location: Path | str, content: Content) -> int:
        """Load a checkpoint, and return its step.

        Raises:
            CheckpointError: it is of another optimizer or schedule.
        """
        self._check_update(location, content.extra)
        self.load(content.tensors, content.extra)
        return content.manifest.step

    def load(self, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
        """Load the state of a checkpoint or of another worker, with the same model and update."""
        with torch.no_grad():
            for name, value in self.tensors().items():
                if not name.startswith("optimizer/"):
                    value.copy_(tensors[name])
        state = {name: value for name, value in tensors.items() if name.startswith("optimizer/")}
        load_optimizer_state(self._model, self._update.optimizer, state)
        for group, values in zip(self._update.optimizer.param_groups, extra["groups"], strict=True):
            group.update(values)
        if self._update.schedule is not None:
            self._update.schedule.load_state_dict(extra["schedule"])
        self._strategy_state.clear()
        self._strategy_state.update(extra["strategy_state"])

    def _check_update(self, location: Path | str, extra: dict[str, Any]) -> None:
        schedule = extra["schedule"]
        saved = {"the optimizer": extra["optimizer"], "the number of its groups": len(extra["groups"])}
        saved["a schedule"] = "none" if schedule is None else "given"
        optimizer = self._update.optimizer
        here = {"the optimizer": type(optimizer).__name__, "the number of its groups": len(optimizer.param_groups)}
        here["a schedule"] = "none" if self._update.schedule is None else "given"
        difference = manifest.first_difference(saved, here)
        if difference:
            raise CheckpointError(
                f"{location} was made with another update: {difference}. Use the same one, or start a new run."
            )

    def _check_same(self, location: Path | str, saved: Manifest) -> None:
        difference = manifest.first_difference(saved.order, self._order)
        if difference:
            raise CheckpointError(
                f"{location} was made with another order of samples: {difference}. A position in the data has no "
                f"meaning then; use the same value. (With batch_per_worker on another number of workers: set batch to "
                f"the product of that run, scale_lr to none and warmup_steps to 0.)"
            )
        if not self._numerics["exact"]:
            return
        difference = manifest.first_difference(saved.numerics, self._numerics)
        difference = difference or manifest.first_difference(saved.versions, self._versions)
        if difference:
            raise CheckpointError(
                f"{location} cannot be resumed with the same bits: {difference}. Use the same value, or exact=False."
            )
