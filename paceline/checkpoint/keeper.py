"""When to save, what to save, and how to go on from it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint import load, manifest, save
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.state import check_savable, fingerprint, put_optimizer_state, tensors_of
from paceline.comm.world import World
from paceline.config import CheckpointSettings
from paceline.errors import CheckpointError
from paceline.events import EventLog

_log = logging.getLogger("paceline")


class Keeper:
    """Keeps the state of one run in checkpoints.

    Args:
        world: the workers; rank 0 writes.
        settings: where, how often, how many.
        folder: where checkpoints go unless the settings say so.
        events: where to record what was done.
    """

    def __init__(self, world: World, settings: CheckpointSettings, folder: Path | None, events: EventLog) -> None:
        self._world = world
        self._settings = settings
        self._events = events
        self.folder = settings.directory or folder
        if settings.every and self.folder is None:
            raise CheckpointError("checkpoint.every is set but not where to save: set checkpoint.directory.")

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be taken after so many steps."""
        return self._settings.every is not None and step % self._settings.every == 0

    def save(self, state: State, step: int) -> Path:
        """Write a checkpoint; rank 0 does, the others go on.

        Raises:
            CheckpointError: there is nowhere to save to, or writing failed.
        """
        if self.folder is None:
            raise CheckpointError("There is nowhere to save to: set checkpoint.directory, or start with paceline run.")
        path = self.folder / manifest.name_of(step)
        if self._world.rank == 0:
            with self._events.span("checkpoint", step=step, path=str(path)):
                save.save(self.folder, state.manifest(step), state.tensors(), state.extra(), self._settings.keep)
        return path

    def resume(self, state: State, resume: str | None) -> int:
        """Load the checkpoint that ``resume`` asks for; returns the step to go on from, 0 for a fresh start.

        Raises:
            CheckpointError: it cannot be used, or the folder holds another run's checkpoints and none was asked for.
        """
        if resume is None:
            self._refuse_leftovers()
            return 0
        found = self._world.gather(load.find(resume, self.folder), "start")[0]  # what rank 0 sees
        if found is None:
            _log.info("resume: no checkpoint in %s yet, starting from the beginning", self.folder)
            return 0
        path = Path(found)
        saved = manifest.read(path)
        self._refuse_later(path)
        step = state.restore(path, saved)
        _log.info("resumed from %s at step %d", path, step)
        self._events.mark("resume", step=step, path=str(path))
        return step

    def _refuse_later(self, path: Path) -> None:
        """Going on from an earlier step beside later ones would mix two courses of training in one folder."""
        if self.folder is None or path.resolve().parent != self.folder.resolve():
            return
        newest = manifest.complete(self.folder)[0]
        if newest.name != path.name:
            raise CheckpointError(
                f"The checkpoint folder holds {newest.name}, later than {path.name}, from which this run is to go on. "
                f"Choose another checkpoint.directory, or remove the later ones."
            )

    def _refuse_leftovers(self) -> None:
        """A new run must not mix its checkpoints with those of another one; all workers look before anyone writes."""
        there = manifest.complete(self.folder) if self.folder else []
        found = self._world.gather(str(there[0]) if there else "", "start")[0]
        if found:
            raise CheckpointError(
                f"The checkpoint folder already holds {found} of an earlier run. Set resume='auto' to go on from it, "
                f"or choose another checkpoint.directory."
            )


class Updating(Protocol):
    """What updates the model, as far as it has a state."""

    optimizer: Optimizer
    schedule: LRScheduler | None


class State:
    """The state of a run: what is saved and restored.

    Args:
        model: the model.
        update: its optimizer and schedule.
        order: what decides the order of samples; a checkpoint of another order is refused.
        numerics: what decides the bits; must be the same with ``exact``.
        versions: of Python and the libraries.
    """

    def __init__(
        self,
        model: nn.Module,
        update: Updating,
        order: dict[str, int],
        numerics: dict[str, object],
        versions: dict[str, str],
    ) -> None:
        self._model = model
        self._update = update
        self._order = order
        self._numerics = numerics
        self._versions = versions

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return tensors_of(self._model, self._update.optimizer)

    def manifest(self, step: int) -> Manifest:
        """The description of the state after so many steps."""
        check_savable(self._update.optimizer)
        tensors = self.tensors()
        kinds: dict[str, list[object]] = {
            name: [str(value.dtype), list(value.shape)] for name, value in tensors.items()
        }
        return Manifest(step, self._order, kinds, fingerprint(tensors), self._numerics, self._versions)

    def extra(self) -> dict[str, Any]:
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
        }

    def restore(self, path: Path, saved: Manifest) -> int:
        """Take over a checkpoint; returns its step.

        Raises:
            CheckpointError: it is of another model, another order of samples, or other numerics with ``exact``.
        """
        load.check_model(saved, self._model, path)
        self._check_same(path, saved)
        tensors, extra = load.load(path, saved)
        self._check_update(path, extra)
        with torch.no_grad():
            for name, value in self.tensors().items():
                if not name.startswith("optimizer/"):
                    value.copy_(tensors[name])
        state = {name: value for name, value in tensors.items() if name.startswith("optimizer/")}
        put_optimizer_state(self._model, self._update.optimizer, state)
        for group, values in zip(self._update.optimizer.param_groups, extra["groups"], strict=True):
            group.update(values)
        if self._update.schedule is not None:
            self._update.schedule.load_state_dict(extra["schedule"])
        return saved.step

    def _check_update(self, path: Path, extra: dict[str, Any]) -> None:
        schedule = extra["schedule"]
        saved = {"the optimizer": extra["optimizer"], "the number of its groups": len(extra["groups"])}
        saved["a schedule"] = "none" if schedule is None else "given"
        optimizer = self._update.optimizer
        here = {"the optimizer": type(optimizer).__name__, "the number of its groups": len(optimizer.param_groups)}
        here["a schedule"] = "none" if self._update.schedule is None else "given"
        difference = manifest.first_difference(saved, here)
        if difference:
            raise CheckpointError(f"{path} was made with another update: {difference}. Use the same, or start anew.")

    def _check_same(self, path: Path, saved: Manifest) -> None:
        difference = manifest.first_difference(saved.order, self._order)
        if difference:
            raise CheckpointError(
                f"{path} was made with another order of samples: {difference}. A position in the data has no meaning "
                f"then; use the same value. (With batch_per_worker on another number of workers: set batch to the "
                f"product of that run, scale_lr to none and warmup_steps to 0.)"
            )
        if not self._numerics["exact"]:
            return
        difference = manifest.first_difference(saved.numerics, self._numerics)
        difference = difference or manifest.first_difference(saved.versions, self._versions)
        if difference:
            raise CheckpointError(
                f"{path} cannot be continued with the same bits: {difference}. Use the same value, or exact=False."
            )
