"""What belongs to the state of a run: taken for a checkpoint, compared with one, and put back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint import files, load, manifest
from paceline.checkpoint.load import Content
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.snapshot import Snapshot
from paceline.checkpoint.tensors import check_savable, load_optimizer_state, named_tensors
from paceline.errors import CheckpointError


class Updating(Protocol):
    """What updates the model, as far as it has a state."""

    optimizer: Optimizer
    schedule: LRScheduler | None


class TrainingState:
    """The state of a run: what is saved and restored.

    Args:
        model: the model.
        update: its optimizer and schedule.
        order: what decides the order of samples; a checkpoint of another order is refused.
        numerics: what decides the bits; must be the same with ``exact``.
        versions: of Python and the libraries.
        books: what the strategy remembers.
    """

    def __init__(
        self,
        model: nn.Module,
        update: Updating,
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
        self._books = strategy_state

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return named_tensors(self._model, self._update.optimizer)

    def snapshot(self, step: int) -> Snapshot:
        """The state after so many steps, as it is now: the tensors are those that training goes on with.

        Raises:
            CheckpointError: the optimizer has a state that cannot be saved.
        """
        check_savable(self._update.optimizer)
        extra = files.as_tensor(self._extra())
        return Snapshot(step, self.tensors(), extra, self._order, self._numerics, self._versions)

    def _extra(self) -> dict[str, Any]:
        """What is no tensor: the optimizer's groups and the schedule."""
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._update.optimizer.param_groups
        ]
        schedule = self._update.schedule
        return {
            "optimizer": type(self._update.optimizer).__name__,
            "groups": groups,
            "schedule": None if schedule is None else schedule.state_dict(),
            "books": dict(self._books),
        }

    def check(self, place: Path | str, saved: Manifest) -> None:
        """Refuse a checkpoint that is of something else.

        Raises:
            CheckpointError: it is of another model, another order of samples, or other numerics with ``exact``.
        """
        load.check_model(saved, self._model, place)
        self._check_same(place, saved)

    def put(self, place: Path | str, content: Content) -> int:
        """Take over a checkpoint that was read; returns its step.

        Raises:
            CheckpointError: it is of another optimizer or schedule.
        """
        self._check_update(place, content.extra)
        self.take(content.tensors, content.extra)
        return content.manifest.step

    def take(self, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
        """Take over the state of another worker, or of a checkpoint, of the same model and update."""
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
        self._books.clear()
        self._books.update(extra.get("books", {}))

    def _check_update(self, place: Path | str, extra: dict[str, Any]) -> None:
        schedule = extra["schedule"]
        saved = {"the optimizer": extra["optimizer"], "the number of its groups": len(extra["groups"])}
        saved["a schedule"] = "none" if schedule is None else "given"
        optimizer = self._update.optimizer
        here = {"the optimizer": type(optimizer).__name__, "the number of its groups": len(optimizer.param_groups)}
        here["a schedule"] = "none" if self._update.schedule is None else "given"
        difference = manifest.first_difference(saved, here)
        if difference:
            raise CheckpointError(f"{place} was made with another update: {difference}. Use the same, or start anew.")

    def _check_same(self, place: Path | str, saved: Manifest) -> None:
        difference = manifest.first_difference(saved.order, self._order)
        if difference:
            raise CheckpointError(
                f"{place} was made with another order of samples: {difference}. A position in the data has no meaning "
                f"then; use the same value. (With batch_per_worker on another number of workers: set batch to the "
                f"product of that run, scale_lr to none and warmup_steps to 0.)"
            )
        if not self._numerics["exact"]:
            return
        difference = manifest.first_difference(saved.numerics, self._numerics)
        difference = difference or manifest.first_difference(saved.versions, self._versions)
        if difference:
            raise CheckpointError(
                f"{place} cannot be continued with the same bits: {difference}. Use the same value, or exact=False."
            )
