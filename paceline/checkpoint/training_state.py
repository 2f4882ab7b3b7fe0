"""State of a run: snapshot, host buffers for background writes, comparison with a checkpoint, restore."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint import encoding, files
from paceline.checkpoint.encoding import EncodingError
from paceline.checkpoint.load import Content, Shares, check_model, described
from paceline.checkpoint.manifest import METADATA, DamagedError, Manifest, first_difference
from paceline.checkpoint.tensors import (
    REPLICA,
    StreamedTensors,
    check_savable,
    each,
    fingerprint,
    fingerprint_of,
    hash_of,
    load_named_tensors,
    load_optimizer_lists,
    named_tensors,
    optimizer_lists,
    state_dict_names,
)
from paceline.errors import CheckpointError, InputError, WorkerLost

SHARES = "shares"  # name of the tensors that the workers have in shares, for :meth:`TrainingState.snapshot`
_NOT_HASHED = (
    "session.fingerprint(): each worker has a share of the optimizer's state, and the workers have not hashed it since "
    "the last step. Call it after the last batch of session.batches(), or after session.save()."
)


@dataclass(frozen=True)
class Snapshot:
    """Content of a checkpoint.

    Attributes:
        step: number of completed steps.
        state: rest of the state (see encoding.py).
        order, numerics, versions: see :class:`Manifest`.
        time: time of the snapshot in seconds since 1970.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    state: Any
    order: dict[str, int]
    numerics: dict[str, int | str]
    versions: dict[str, str]
    time: float = field(default_factory=time.time)

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def manifest(self, parts: Collection[files.CheckpointShard], index: tuple[int, str]) -> Manifest:
        """Return the manifest for the snapshot and its shards. ``index`` is the size and hash of METADATA."""
        hashes = {name: value for part in parts for name, value in part.hashes.items()}
        return Manifest(
            step=self.step,
            order=self.order,
            tensors={name: (str(value.dtype), list(value.shape)) for name, value in self.tensors.items()},
            offsets={name: offset for part in parts for name, offset in part.offsets.items()},
            files={METADATA: index} | {part.name: (part.size, part.hash) for part in parts},
            fingerprint=fingerprint_of(hashes),
            state=self.state,
            numerics=self.numerics,
            versions=self.versions,
            time=self.time,
            parts={name: part.name for part in parts for name in part.offsets},
            hashes=hashes,
        )


class HostBuffers:
    """Host memory for a snapshot, reused by each save."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Copy a snapshot, so that training may change the original. The copy is valid until the next call.

        Copies from a GPU go to pinned memory asynchronously, with one synchronization per device at the end.
        """
        copies: dict[str, torch.Tensor] = {}
        devices = set()
        for name, value in each(snapshot.tensors):
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            buffer.copy_(value, non_blocking=value.is_cuda)
            if value.is_cuda:
                devices.add(value.device)
            copies[name] = buffer
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = copies
        return replace(snapshot, tensors=copies)


class StatefulUpdate(Protocol):
    """Optimizer and schedule, whose state is saved. ``kind`` describes the class of the optimizer."""

    optimizer: Optimizer
    schedule: LRScheduler | None

    @property
    def kind(self) -> str: ...

    def other_names(self) -> str: ...


class Stateful(Protocol):
    """Stateful component with a state of plain values and tensors that depends on the step."""

    def state(self, step: int) -> Any:
        """Return the state after ``step`` steps."""

    def load(self, state: Any) -> None:
        """Continue from a state that :meth:`state` returned."""


class LoopChanges(Stateful, Protocol):
    """Values that the loop body changes; see ``data.objects.loop_changes``."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies, from when the last step returned, of the tensors that the loop changes."""


class ScriptState(Protocol):
    """Values of the script that belong to the state."""

    def of_now(self) -> AbstractContextManager[None]:
        """Return a context in which :meth:`saved` returns the current values instead of the copies."""

    def saved(self) -> dict[str, Any]:
        """Return the copied values, as plain values and tensors."""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load values that :meth:`saved` returned."""


class DividedState(Protocol):
    """Tensors of the optimizer's state of which each worker has a share. Rank 0 collects them for a save."""

    hashes: Mapping[str, str] | None  # hash of each tensor by name. None if they are not known for the current step
    prefix: str | tuple[str, ...]  # prefix of the names of the tensors

    def collect(self, local: Mapping[str, torch.Tensor]) -> StreamedTensors:
        """Return the local tensors and the divided ones. Rank 0 calls this while the others call :meth:`send`."""

    def send(self) -> None:
        """Send this worker's share as often as rank 0 reads it, until rank 0 calls :meth:`end`."""

    def end(self) -> None:
        """End the calls of :meth:`send`."""


class TrainingState:
    """State of a run, with snapshot and restore.

    Args:
        order: values that determine the order of samples. A checkpoint of another order is refused.
        numerics: values that affect the bits of the result. They must be the same with ``exact``.
        strategy_state: state of the strategy, changed in place.
    """

    def __init__(  # noqa: PLR0913 - the components of a state
        self,
        model: nn.Module,
        update: StatefulUpdate,
        order: dict[str, int],
        numerics: dict[str, int | str],
        versions: dict[str, str],
        strategy_state: dict[str, Any],
        script: ScriptState | None = None,
        loop: LoopChanges | None = None,
    ) -> None:
        self._model = model
        self._names = state_dict_names(model)
        self._update, self._order, self._numerics = update, order, numerics
        self._versions, self._strategy_state, self._script = versions, strategy_state, script
        self._loop = loop
        # returns the state that the workers have in shares. None if this worker has the whole state.
        self.divided: Callable[[], DividedState | None] = lambda: None
        self.shares: Shares | None = None  # loads a checkpoint if each worker reads its share. None if it reads all
        self.replicas: dict[str, torch.Tensor] = {}  # tensors of replicas while no strategy has them
        self.keeps_script = False  # whether :meth:`load` leaves the values of the script unchanged
        self.loaded_script: dict[str, Any] = {}  # values of the script in the state that was loaded last
        self.run = ""  # identifier of the run in its checkpoints, the same for all runs that resume from one start
        # other stateful components of the run, by name
        self.parts: dict[str, Stateful] = {} if loop is None else {"loop": loop}

    def tensors(self) -> dict[str, torch.Tensor]:
        return named_tensors(self._model, self._update.optimizer)

    def script_of_now(self) -> AbstractContextManager[None]:
        """Return a context in which a snapshot has current script values, not those when the last step returned."""
        return nullcontext() if self._script is None else self._script.of_now()

    def snapshot(self, step: int, without: Collection[str] = ()) -> Snapshot:
        """Return the state after ``step`` steps. The tensors are not copied, so training changes them.

        Args:
            without: names of ``parts`` that are left out, or :data:`SHARES`.
        """
        if text := self._update.other_names():
            raise CheckpointError(text)
        check_savable(self._update.optimizer, lists=True)
        inside: dict[str, torch.Tensor] = {}
        try:
            parts = {name: part.state(step) for name, part in self.parts.items() if name not in without}
            state = encoding.encode(self._plain() | {"parts": parts}, inside, "the state")
        except EncodingError as error:
            raise CheckpointError(
                f"{error}, which cannot be saved or sent to another worker. The parameter groups of the optimizer, and "
                f"the state_dict of the schedule or of a stream of data, may hold tensors, numbers, text, functions, "
                f"and containers of these, as may what session.register was given."
            ) from None
        inside = {name: tensor.detach() for name, tensor in inside.items()}
        changed = {} if self._loop is None else self._loop.tensors()
        tensors: Mapping[str, torch.Tensor] = self.tensors() | changed | inside
        if SHARES not in without:
            tensors = {**tensors, **self.replicas}
        if (divided := self.divided()) is not None and SHARES not in without:
            tensors = divided.collect(_undivided(tensors, divided.prefix))
        return Snapshot(step, tensors, state, self._order, self._numerics, self._versions)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Return a context in which rank 0 makes and reads a snapshot, while the other workers send their shares."""
        divided = self.divided()
        try:
            yield
        except Exception as error:
            if divided is not None and not isinstance(error, WorkerLost):
                divided.end()
            raise
        if divided is not None:
            divided.end()

    def fingerprint(self) -> str:
        """Return the fingerprint of all tensors."""
        divided, tensors = self.divided(), self.tensors()
        if divided is None:
            return fingerprint(tensors)
        if divided.hashes is None:
            raise InputError(_NOT_HASHED)
        own = {name: hash_of(value).hex() for name, value in _undivided(tensors, divided.prefix).items()}
        return fingerprint_of({**divided.hashes, **own})

    def _plain(self) -> dict[str, Any]:
        """Return the state outside of named tensors: parameter groups, schedule, strategy state, module modes."""
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._update.optimizer.param_groups
        ]
        schedule = self._update.schedule
        return {
            "run": self.run,
            "names": self._names,
            "optimizer": self._update.kind,
            "groups": groups,
            "lists": optimizer_lists(self._model, self._update.optimizer),
            "schedule": None if schedule is None else schedule.state_dict(),
            "strategy_state": dict(self._strategy_state),
            "frozen": [name for name, one in self._model.named_parameters() if not one.requires_grad],
            "evaluating": [name for name, one in self._model.named_modules() if not one.training],
            "script": {} if self._script is None else self._script.saved(),
        }

    def check(self, location: Path | str, saved: Manifest) -> None:
        """Raise CheckpointError if a checkpoint does not fit this run.

        Raises:
            CheckpointError: the model, the order of samples, the optimizer or schedule, or with ``exact`` the numerics
                or versions differ.
        """
        check_model(saved, self._model, location)
        self._check_update(location, saved)
        self._check_same(location, saved)

    def restore(self, location: Path | str, content: Content) -> int:
        self.load(content.tensors, content.manifest.state)
        if self.shares is not None and content.manifest.hashes:
            known = content.manifest.hashes
            divided = "optimizer/", "parameter/"
            self.shares.hashes = {name: value for name, value in known.items() if name.startswith(divided)}
        return content.manifest.step

    def load(self, tensors: dict[str, torch.Tensor], encoded: Any) -> None:
        """Move the state of a checkpoint or of another worker, with the same model and update, out of ``tensors``."""
        rest = encoding.decode(encoded, tensors, self._plain(), "the state")
        if self.shares is None:
            load_named_tensors(self._model, self._update.optimizer, tensors)
        else:
            self.shares.load(tensors)
        load_optimizer_lists(self._model, self._update.optimizer, rest.get("lists", {}))
        for group, values in zip(self._update.optimizer.param_groups, rest["groups"], strict=True):
            group.update(values)
        if self._update.schedule is not None:
            self._update.schedule.load_state_dict(rest["schedule"])
        self._load_flags(rest)
        self.loaded_script = rest.get("script", {})
        if not self.keeps_script:
            self.load_script()
        self.run = rest["run"]
        for name, part in rest.get("parts", {}).items():
            if name in self.parts:
                self.parts[name].load(part)
        self.replicas.clear()
        self.replicas.update((name, value) for name, value in tensors.items() if name.startswith(REPLICA))
        self._strategy_state.clear()
        self._strategy_state.update(rest["strategy_state"])

    def load_script(self) -> None:
        """Restore the values of the script from the state that was loaded last."""
        if self._script is not None:
            self._script.load(self.loaded_script)

    def _load_flags(self, rest: dict[str, Any]) -> None:
        """Restore frozen parameters and evaluation modes. Checkpoints of older versions do not have them."""
        if "frozen" in rest:
            frozen = set(rest["frozen"])
            for name, value in self._model.named_parameters():
                if value.requires_grad == (name in frozen):
                    value.requires_grad_(name not in frozen)
        if "evaluating" in rest:
            evaluating = set(rest["evaluating"])
            for name, one in self._model.named_modules():
                one.training = name not in evaluating

    def _check_update(self, location: Path | str, manifest: Manifest) -> None:
        here = self._plain()
        try:
            saved = encoding.decode(manifest.state, dict.fromkeys(manifest.tensors, torch.empty(0)), here, "the state")
            differs = first_difference(described(saved), described(here))
        except (EncodingError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise DamagedError(f"{location} is damaged: {files.reason_of(error)}.") from None
        if differs:
            raise CheckpointError(
                f"{location} was made with another update: {differs}. Use the same one, or start a new run."
            )

    def _check_same(self, location: Path | str, saved: Manifest) -> None:
        length, rounds = saved.order.get("length"), "feistel_rounds"
        if length == self._order.get("length") and saved.order.get(rounds) != self._order.get(rounds):
            raise CheckpointError(
                f"{location} was made by a version of Paceline with another order of samples for a data set of "
                f"{length:,}: {rounds} was {saved.order.get(rounds)} and is now {self._order.get(rounds)}. Resume it "
                f"with that version, or start a new run."
            )
        if difference := first_difference(saved.order, self._order):
            raise CheckpointError(
                f"{location} was made with another order of samples: {difference}. A position in the data has no "
                f"meaning then; use the same value. (With batch_per_worker on another number of workers: set batch to "
                f"the product of that run, scale_lr to none and warmup_steps to 0.)"
            )
        if not self._numerics["exact"]:
            return
        numerics = {"wire": "float32"} | saved.numerics  # older checkpoints have fewer
        here = {name: value for name, value in self._numerics.items() if name in numerics}
        difference = first_difference(numerics, here)
        difference = difference or first_difference(saved.versions, self._versions)
        if difference:
            raise CheckpointError(
                f"{location} cannot be resumed with the same bits: {difference}. Use the same value, or exact=False."
            )


def _undivided(tensors: Mapping[str, torch.Tensor], prefix: str | tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if not name.startswith(prefix)}
