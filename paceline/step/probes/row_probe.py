"""Probe whether an optimizer takes the sparse gradients of embeddings, and updates each row of a table by itself."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.data.keys import preserve_generators, seed_torch
from paceline.errors import InputError
from paceline.step.context import TrainingContext
from paceline.step.optimizers.several import parts_of
from paceline.step.probes.optimizer_probe import PROBE_SCALES, copy_small, set_initial_state, step_of

_PARTS, _GIVEN = (23, 18), 15
"""Rows of the parts of a small table, and number of rows that get a gradient in a step."""
_CURE = (
    "Use torch's SGD without momentum, Adagrad or SparseAdam, without weight decay for this parameter, or "
    "torch.nn.Embedding with sparse=False."
)


def probe_rows(context: TrainingContext) -> None:
    """Raise InputError if an optimizer cannot train an embedding with sparse gradients.

    A copy of the optimizer takes some steps on small tables and, if the workers update different rows, on two parts of
    each table. An optimizer that cannot be copied is tried in the first step.
    """
    tables = {id(value): name for name, value in context.update.parameters.items() if name in context.sparse}
    for optimizer in parts_of(context.update.optimizer):
        held = [id(value) for group in optimizer.param_groups for value in group["params"]]
        if own := [tables[one] for one in held if one in tables]:
            with preserve_generators():
                _probe(optimizer, [place for place, one in enumerate(held) if one in tables], own, context)


def _probe(optimizer: Optimizer, places: Container[int], names: Sequence[str], context: TrainingContext) -> None:
    kind, what = type(optimizer).__name__, f"the parameter {names[0]!r}, whose gradient is sparse"
    try:
        small, parts = (_Small(optimizer, places, cut=cut) for cut in (False, True))
    except Exception:  # noqa: BLE001 - an optimizer may reject copies in any way
        return
    try:
        small.train()
    except Exception as error:
        raise InputError(f"{kind} cannot update {what}: {error}. {_CURE}") from error
    if key := small.key_of(lambda entry, _: entry.is_sparse):
        because = "which cannot be saved or sent to workers that join"
        raise InputError(f"{kind} keeps a sparse {key!r} for {what}, {because}. {_CURE}")
    if context.divides_update:
        cause = _cause_against_division(small, parts)
        strategy = f"With strategy {context.settings.strategy!r} different workers update different rows"
        if cause:
            raise InputError(f"{kind} {cause} of {what}. {strategy}. {_CURE}")
        for name, (key, entry) in small.row_states(names):
            shape = len(context.update.parameters[name]), *entry.shape[1:]
            context.update.row_states[f"optimizer/{name}/{key}"] = torch.Size(shape)


def _cause_against_division(small: _Small, parts: _Small) -> str:
    """Return why workers cannot update different rows. Empty if they can."""
    if small.changes_others:
        return "changes rows without a gradient"
    if key := small.key_of(
        lambda entry, value: not _is_for_rows(entry, value) and entry.shape not in ((), value.shape)
    ):
        return f"keeps a {key!r} of another shape than that"
    parts.train()
    return "" if all(map(torch.equal, small.values, parts.values)) else "looks at several rows to update one row"


class _Small:
    """Copy of an optimizer for small tables, or for the parts of each."""

    def __init__(self, optimizer: Optimizer, places: Container[int], *, cut: bool) -> None:
        self.optimizer, parameters = copy_small(optimizer, _example, state=False)
        self.values = [value for place, value in enumerate(parameters) if place in places]
        self._before = [value.detach().clone() for value in self.values]
        self._given = [torch.zeros(len(value), dtype=torch.bool) for value in self.values]
        self._parts = {value: _split(value) if cut else [value] for value in self.values}
        for group in self.optimizer.param_groups:
            group["params"] = [part for value in group["params"] for part in self._parts.get(value, ())]
        set_initial_state(self.optimizer, optimizer)

    def train(self) -> None:
        """Take some steps, each with gradients for some rows."""
        for number, scale in enumerate(PROBE_SCALES):
            for place, (value, parts) in enumerate(self._parts.items()):
                seed_torch(number * len(self._parts) + place)
                rows = torch.randperm(len(value) - 1)[:_GIVEN].sort()[0]
                self._given[place][rows] = True
                gradient = torch.zeros_like(value)
                gradient[rows.to(value.device)] = scale * torch.randn_like(value[: len(rows)])
                for part, grad in zip(parts, gradient.split([*map(len, parts)]), strict=True):
                    part.grad = grad.detach().to_sparse(1)
            step_of(self.optimizer)(self.optimizer)

    def key_of(self, fits: Callable[[torch.Tensor, torch.Tensor], bool]) -> str:
        """Return the key of a state, given with its table, that fits. Empty if none does."""
        states = [(value, entry) for value in self.values for entry in self.optimizer.state.get(value, {}).items()]
        tensors = [(key, entry, value) for value, (key, entry) in states if isinstance(entry, torch.Tensor)]
        return next((key for key, entry, value in tensors if fits(entry, value)), "")

    def row_states(self, names: Sequence[str]) -> Iterator[tuple[str, tuple[str, torch.Tensor]]]:
        """Yield each state that has one value for each row of its table, with the table's name and the state's key."""
        for name, value in zip(names, self.values, strict=True):
            for key, entry in self.optimizer.state.get(value, {}).items():
                if isinstance(entry, torch.Tensor) and _is_for_rows(entry, value):
                    yield name, (key, entry)

    @property
    def changes_others(self) -> bool:
        """Whether a row has changed that has never had a gradient."""
        rows = zip(self.values, self._before, self._given, strict=True)
        return not all(torch.equal(value[~given], before[~given]) for value, before, given in rows)


def _is_for_rows(entry: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether a state has one value for each row of its table."""
    return entry.shape != value.shape and entry.shape[:1] == value.shape[:1] and entry.numel() == len(value)


def _split(value: nn.Parameter) -> list[nn.Parameter]:
    return [nn.Parameter(part) for part in value.detach().split(_PARTS)]


def _example(value: torch.Tensor) -> torch.Tensor:
    """Return a small table, whose rows have at most 64 elements."""
    return value.new_empty(sum(_PARTS), *(min(size, 64) for size in value.shape[1:2]))
